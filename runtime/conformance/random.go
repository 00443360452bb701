package conformance

var randomCases = []testCase{}
