package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
)

// OccupyRenewals takes every connection that renewals and health checks have, until release.
func (in *Inbox) OccupyRenewals(ctx context.Context) (release func(), err error) {
	var taken []*pgxpool.Conn
	release = func() {
		for _, conn := range taken {
			conn.Release()
		}
	}
	for range in.renewals.Config().MaxConns {
		conn, err := in.renewals.Acquire(ctx)
		if err != nil {
			release()
			return nil, fmt.Errorf("take a connection: %w", err)
		}
		taken = append(taken, conn)
	}
	return release, nil
}
