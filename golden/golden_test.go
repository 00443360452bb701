// Package golden holds a folder for each case of the generator: proto files, and the Go that is to come of them.
// The wanted Go is part of the build, so it compiles; the tests here also run it.
//
// After a change of the generator or of a case:
//
//	go test ./golden -update
package golden_test

import (
	"bytes"
	"flag"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

var update = flag.Bool("update", false, "write what is generated into the folders instead of comparing it")

// parameters are those of the cases that need any.
var parameters = map[string]string{
	"samepackage":   "package_suffix=",
	"packagesuffix": "package_suffix=_bus",
}

// TestGolden compares whole folders: a file too many is as wrong as one that is missing or differs.
func TestGolden(t *testing.T) {
	t.Parallel()
	all := compile(t, checkout(t), "options", "golden")
	wantedPB := runProtocGenGo(t, request(all, "", inCase("")))
	for _, name := range cases(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wanted := filesOf(t, generate(t, request(all, parameters[name], inCase(name))))
			for file, content := range wantedPB {
				if inCase(name)(file) {
					wanted[file] = content
				}
			}
			if *update {
				write(t, name, wanted)
				return
			}
			if diff := cmp.Diff(wanted, goFiles(t, name)); diff != "" {
				t.Errorf("generated (-) and golden/%s (+) differ; if the change is meant, run go test ./golden -update:\n%s", name, diff)
			}
		})
	}
}

// TestGeneratedBytesDoNotDependOnOrder holds that neither a second run nor the order of the request shows.
func TestGeneratedBytesDoNotDependOnOrder(t *testing.T) {
	t.Parallel()
	all := compile(t, checkout(t), "options", "golden")
	req := request(all, "", func(file string) bool {
		return path.Dir(file) != "." && parameters[caseOf(file)] == "" && !strings.HasPrefix(file, "leasebus/") && !strings.HasPrefix(file, "google/")
	})
	first := marshal(t, generate(t, req))
	if !bytes.Equal(first, marshal(t, generate(t, req))) {
		t.Error("a second run of the same request gives other bytes")
	}
	for seed := range uint64(3) {
		shuffled := shuffle(proto.CloneOf(req), rand.New(rand.NewPCG(seed, 0)))
		if !bytes.Equal(first, marshal(t, generate(t, shuffled))) {
			t.Errorf("a request in another order (seed %d) gives other bytes", seed)
		}
	}
}

// shuffle reorders a request, leaving each file behind those that it imports, as the protocol demands.
func shuffle(req *pluginpb.CodeGeneratorRequest, random *rand.Rand) *pluginpb.CodeGeneratorRequest {
	swap := func(s []string) { random.Shuffle(len(s), func(i, j int) { s[i], s[j] = s[j], s[i] }) }
	swap(req.GetFileToGenerate())
	byName := map[string]*descriptorpb.FileDescriptorProto{}
	for _, file := range req.GetProtoFile() {
		byName[file.GetName()] = file
	}
	names := slices.Sorted(maps.Keys(byName))
	swap(names)
	req.ProtoFile = nil
	var add func(name string)
	add = func(name string) {
		file := byName[name]
		if file == nil || slices.Contains(req.GetProtoFile(), file) {
			return
		}
		for _, dependency := range file.GetDependency() {
			add(dependency)
		}
		req.ProtoFile = append(req.ProtoFile, file)
	}
	for _, name := range names {
		add(name)
	}
	return req
}

// cases lists the folders.
func cases(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		if entry.IsDir() && entry.Name() != "testdata" {
			names = append(names, entry.Name())
		}
	}
	return names
}

func caseOf(file string) string {
	name, _, _ := strings.Cut(file, "/")
	return name
}

// inCase selects the files of one case; "" = of all of them.
func inCase(name string) func(file string) bool {
	return func(file string) bool {
		if name != "" {
			return caseOf(file) == name
		}
		_, err := os.Stat(caseOf(file))
		return err == nil
	}
}

// goFiles reads what there is of Go in the folder of a case.
func goFiles(t *testing.T, name string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(name, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(file) != ".go" {
			return err
		}
		files[filepath.ToSlash(file)] = string(read(t, file))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// write makes the Go files of a folder what they should be.
func write(t *testing.T, name string, wanted map[string]string) {
	t.Helper()
	for file := range goFiles(t, name) {
		if _, ok := wanted[file]; !ok {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}
	}
	for file, content := range wanted {
		place(t, file, []byte(content))
	}
}

func marshal(t *testing.T, response *pluginpb.CodeGeneratorResponse) []byte {
	t.Helper()
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(response)
	if err != nil {
		t.Fatal(err)
	}
	return encoded
}
