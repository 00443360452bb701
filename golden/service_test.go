package golden_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestScripts runs what a user types, in a module of its own: buf, the plugin as go tool runs it, the go command.
// Nothing is fetched: all modules come from the module cache.
func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir:                "testdata/script",
		RequireUniqueNames: true,
		Setup: func(env *testscript.Env) error {
			bin := filepath.Join(env.WorkDir, ".bin")
			if err := os.Mkdir(bin, 0o755); err != nil {
				return err
			}
			if err := os.Symlink(buf(t), filepath.Join(bin, "buf")); err != nil {
				return err
			}
			env.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
			env.Setenv("LEASEBUS", checkout(t))
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("BUF_CACHE_DIR", filepath.Join(env.WorkDir, ".cache"))
			// -mod=mod lets the go command write the requirements that a service would get with go get.
			env.Setenv("GOFLAGS", "-mod=mod")
			env.Setenv("GOPROXY", "off")
			env.Setenv("GOSUMDB", "off")
			for name, value := range goEnv(t, "GOCACHE", "GOMODCACHE", "GOTOOLCHAIN") {
				env.Setenv(name, value)
			}
			return nil
		},
	})
}

func goEnv(t *testing.T, names ...string) map[string]string {
	t.Helper()
	lines := strings.Split(string(run(t, ".", nil, append([]string{"go", "env"}, names...)...)), "\n")
	values := map[string]string{}
	for i, name := range names {
		values[name] = lines[i]
	}
	return values
}
