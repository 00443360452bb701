package leasebus_test

import "runtime"

func goexit() { runtime.Goexit() }
