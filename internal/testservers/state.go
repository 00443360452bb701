//go:build unix

package testservers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// pause is how often a condition is looked at again that nobody tells us about.
const pause = 20 * time.Millisecond

// stateFolder is what all test processes of a user share: locks, an initialised cluster to copy, the shared server.
func stateFolder() (string, error) {
	path := filepath.Join(os.TempDir(), fmt.Sprintf("leasebus-testservers-%d", os.Getuid()))
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); !info.IsDir() || !ok || int(owner.Uid) != os.Getuid() {
		return "", fmt.Errorf("%s is not a folder of yours; remove it", path)
	}
	return path, nil
}

// lockExclusive takes a lock that ends with the process at the latest.
func lockExclusive(ctx context.Context, name string) (unlock func(), err error) {
	folder, err := stateFolder()
	if err != nil {
		return nil, err
	}
	f, err := lockFile(ctx, filepath.Join(folder, name), syscall.LOCK_EX)
	if err != nil {
		return nil, err
	}
	return func() { _ = f.Close() }, nil
}

// lockFile opens a file and locks it, shared or exclusive. Closing the file unlocks it.
func lockFile(ctx context.Context, path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	err = eventually(ctx, func() error { return syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB) })
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// eventually tries until there is no error, or the context ends: then it returns the last error.
func eventually(ctx context.Context, try func() error) error {
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w (last seen: %w)", context.Cause(ctx), err)
		}
	}
}

// The ports of servers lie below those that systems give to outgoing connections. From among those, a client that
// tries again and again while its server is down would one day be connected to itself, or keep the server's port.
const firstPort, lastPort = 15000, 32000

// freePort is a port of 127.0.0.1 that nobody listened on just now.
func freePort() (int, error) {
	var err error
	for range 100 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		var ln net.Listener
		if ln, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return port, ln.Close()
		}
	}
	return 0, err
}

// guardScript waits for the end of its input, which is the end of the process that started it, and clears up: again and
// again, as long as somebody still writes there.
const guardScript = `cat >/dev/null
for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
	for f in "$1"/*.pid "$1"/data/postmaster.pid; do
		[ -f "$f" ] && kill -QUIT "$(head -n 1 "$f")"
	done
	sleep 1
	rm -rf "$1" && exit
done 2>/dev/null`

// guard sees to it that the servers of a folder end, and the folder with them, when this process does, however it ends.
// The returned function calls that off.
func guard(folder string) (release func(), err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	cmd := exec.Command("sh", "-c", guardScript, "guard", folder)
	cmd.Stdin = r
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = w.Close()
		return nil, err
	}
	return func() {
		_ = cmd.Process.Kill()
		_ = w.Close()
		_ = cmd.Wait()
	}, nil
}
