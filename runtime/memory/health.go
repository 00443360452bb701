package memory

import (
	"context"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var _ leasebus.HealthChecker = (*Store)(nil)

// CheckHealth implements [leasebus.HealthChecker]: what is in the process is always up.
func (s *Store) CheckHealth(context.Context) []leasebus.HealthComponent {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return []leasebus.HealthComponent{{Details: map[string]any{"queues": len(s.queues)}}}
}
