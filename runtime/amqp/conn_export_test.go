package amqp

// QuickPace comes back from losses within milliseconds, where a test makes many of them.
func QuickPace() Option { return optionFunc(quickPace) }
