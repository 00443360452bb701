package conformance

var verdictCases, retryCases, processorLeaseCases, drainCases, sharingCases, hookCases, managerCases, randomCases []testCase
