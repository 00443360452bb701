//go:build unix

package testservers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// errNoBinaries says that a server's program is not on this machine.
var errNoBinaries = errors.New("not installed")

// postgresBinaries is the folder that holds postgres and initdb.
func postgresBinaries() (string, error) {
	var folders []string
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		folders = append(folders, strings.TrimSpace(string(out)))
	}
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin",       // Debian and its kin
		"/usr/pgsql-*/bin",                // the PostgreSQL project's RPMs
		"/usr/local/pgsql/bin",            // built from source
		"/opt/homebrew/opt/postgres*/bin", // Homebrew on Apple silicon
		"/usr/local/opt/postgres*/bin",    // Homebrew on Intel
		"/Applications/Postgres.app/Contents/Versions/*/bin",
	} {
		found, _ := filepath.Glob(pattern) // the patterns are well-formed
		slices.SortFunc(found, byVersion)
		folders = append(folders, found...)
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		folders = append(folders, filepath.Dir(path))
	}
	for _, folder := range folders {
		if executable(filepath.Join(folder, "postgres")) && executable(filepath.Join(folder, "initdb")) {
			return folder, nil
		}
	}
	return "", fmt.Errorf("the programs postgres and initdb: %w", errNoBinaries)
}

// byVersion puts the newest first: 17 before 9.6.
func byVersion(a, b string) int { return versionIn(b) - versionIn(a) }

func versionIn(path string) int {
	numbers := strings.FieldsFunc(path, func(r rune) bool { return r < '0' || r > '9' })
	if len(numbers) == 0 {
		return 0
	}
	n, _ := strconv.Atoi(numbers[0]) // digits only; what is too long for a number is no version
	return n
}

func pgbouncerBinary() (string, error) {
	if path, err := exec.LookPath("pgbouncer"); err == nil {
		return path, nil
	}
	for _, path := range []string{"/usr/sbin/pgbouncer", "/opt/homebrew/bin/pgbouncer", "/usr/local/sbin/pgbouncer"} {
		if executable(path) {
			return path, nil
		}
	}
	return "", fmt.Errorf("the program pgbouncer: %w", errNoBinaries)
}

// rabbitScripts is the folder of RabbitMQ's own scripts. Those of Debian that are in the PATH run as one user only.
func rabbitScripts() (string, error) {
	var folders []string
	if path, err := exec.LookPath("rabbitmq-server"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			folders = append(folders, filepath.Dir(path))
		}
	}
	for _, pattern := range []string{
		"/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin", // packages
		"/opt/homebrew/opt/rabbitmq/sbin",              // Homebrew on Apple silicon
		"/usr/local/opt/rabbitmq/sbin",                 // Homebrew on Intel
	} {
		found, _ := filepath.Glob(pattern) // the patterns are well-formed
		slices.SortFunc(found, byVersion)
		folders = append(folders, found...)
	}
	for _, folder := range folders {
		if executable(filepath.Join(folder, "rabbitmq-server")) && executable(filepath.Join(folder, "rabbitmqctl")) &&
			executable(filepath.Join(folder, "rabbitmq-env")) {
			if _, err := exec.LookPath("epmd"); err != nil {
				return "", fmt.Errorf("the program epmd, which comes with Erlang: %w", errNoBinaries)
			}
			return folder, nil
		}
	}
	return "", fmt.Errorf("the programs rabbitmq-server and rabbitmqctl: %w", errNoBinaries)
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir() && info.Mode()&0o111 != 0
}

// installed is find, after an attempt to install the package if there is nothing to be found.
func installed(ctx context.Context, find func() (string, error), debian string) (string, error) {
	path, err := find()
	if err == nil {
		return path, nil
	}
	unlock, lockErr := lockExclusive(ctx, "install.lock")
	if lockErr != nil {
		return "", lockErr
	}
	defer unlock()
	if path, err := find(); err == nil { // another process was quicker
		return path, nil
	}
	if installErr := install(ctx, debian); installErr != nil {
		return "", fmt.Errorf("%w, and installing failed: %w", err, installErr)
	}
	return find()
}

// install brings in a Debian package, where that is for us to do.
func install(ctx context.Context, name string) error {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("only Debian packages are installed from here; install %s yourself (brew install %s, dnf install %s)", name, name, name)
	}
	var as []string
	switch {
	case os.Getuid() == 0:
	case os.Getenv("CI") != "":
		as = []string{"sudo", "-n"}
	default:
		return fmt.Errorf("that needs root; run: sudo apt-get install %s", name)
	}
	for _, step := range [][]string{
		{"apt-get", "update", "-q"},
		{"env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-q", "-y", "--no-install-recommends", name},
	} {
		argv := slices.Concat(as, step)
		if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// servant is who servers run as: the caller, or somebody else where the caller is root, whom they refuse.
type servant struct {
	uid, gid int
	other    bool
}

func findServant() (servant, error) {
	if os.Getuid() != 0 {
		return servant{uid: os.Getuid(), gid: os.Getgid()}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		found, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.Atoi(found.Uid)
		gid, gidErr := strconv.Atoi(found.Gid)
		if uidErr == nil && gidErr == nil {
			return servant{uid: uid, gid: gid, other: true}, nil
		}
	}
	return servant{}, errors.New("servers refuse to run as root, and there is no user postgres or nobody to run them as")
}

// own gives a path to the servant.
func (s servant) own(path string) error {
	if !s.other {
		return nil
	}
	return os.Chown(path, s.uid, s.gid)
}

// command is a program that runs as the servant, in a session of its own: an interrupt from the terminal is for the
// tests, which then stop their servers in order.
func (s servant) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Dir = "/" // the servant may not be let into ours
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if s.other {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(s.uid), Gid: uint32(s.gid)}
	}
	return cmd
}
