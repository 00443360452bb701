package golden_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

// TestRefused_S5_S21_S28_S31 holds the exact text of every complaint. Each archive in testdata/refused has proto files,
//   - parameters: those of the plugin, if there are any,
//   - generate: the files that are asked for; without it all of them are,
//   - want: the error.
func TestRefused_S5_S21_S28_S31(t *testing.T) {
	t.Parallel()
	archives, err := filepath.Glob("testdata/refused/*.txtar")
	if err != nil || len(archives) == 0 {
		t.Fatalf("no archives: %v", err)
	}
	for _, name := range archives {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txtar"), func(t *testing.T) {
			t.Parallel()
			refuse(t, name)
		})
	}
}

func refuse(t *testing.T, name string) {
	t.Helper()
	archive, err := txtar.ParseFile(name)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	const annotations = "leasebus/v1/options.proto"
	place(t, filepath.Join(root, "options", annotations), read(t, filepath.Join("..", "options", annotations)))
	sections, files := map[string]string{}, []string(nil)
	for _, file := range archive.Files {
		switch {
		case file.Name == annotations: // stands in for the real one
			place(t, filepath.Join(root, "options", annotations), file.Data)
		case strings.HasSuffix(file.Name, ".proto"):
			place(t, filepath.Join(root, "in", file.Name), file.Data)
			files = append(files, file.Name)
		default:
			sections[file.Name] = strings.TrimSpace(string(file.Data))
		}
	}
	if asked := sections["generate"]; asked != "" {
		files = strings.Fields(asked)
	}

	set := compile(t, root, "options", "in")
	response := generate(t, request(set, sections["parameters"], func(file string) bool { return slices.Contains(files, file) }))

	if len(response.GetFile()) > 0 {
		t.Errorf("%d files are written besides the error", len(response.GetFile()))
	}
	if _, ok := sections["parameters"]; !ok {
		wantFeatures(t, response)
	}
	got := response.GetError()
	if *update {
		updateWant(t, name, archive, got)
		return
	}
	if diff := cmp.Diff(sections["want"], got); diff != "" {
		t.Errorf("the error is not the one in %s (-); got (+):\n%s", name, diff)
	}
}

// wantFeatures holds that an error comes with the features: without them a compiler would complain about those instead.
func wantFeatures(t *testing.T, response *pluginpb.CodeGeneratorResponse) {
	t.Helper()
	const features = pluginpb.CodeGeneratorResponse_FEATURE_PROTO3_OPTIONAL | pluginpb.CodeGeneratorResponse_FEATURE_SUPPORTS_EDITIONS
	if response.GetSupportedFeatures() != uint64(features) ||
		response.GetMinimumEdition() != int32(descriptorpb.Edition_EDITION_PROTO2) ||
		response.GetMaximumEdition() != int32(descriptorpb.Edition_EDITION_2024) {
		t.Errorf("features %b, editions %d to %d", response.GetSupportedFeatures(), response.GetMinimumEdition(), response.GetMaximumEdition())
	}
}

func updateWant(t *testing.T, name string, archive *txtar.Archive, want string) {
	t.Helper()
	archive.Files = slices.DeleteFunc(archive.Files, func(file txtar.File) bool { return file.Name == "want" })
	archive.Files = append(archive.Files, txtar.File{Name: "want", Data: []byte(want + "\n")})
	place(t, name, txtar.Format(archive))
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// place writes a file and the folders above it.
func place(t *testing.T, file string, content []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, content, 0o644); err != nil {
		t.Fatal(err)
	}
}
