package golden_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/compiler/protogen"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"

	"github.com/leasebus/leasebus/internal/gen"
)

// bufBinary is the path of buf: what LEASEBUS_BUF names, or else the one that tools/go.mod pins, which the go command
// builds first if it has to (that takes minutes).
var bufBinary = sync.OnceValues(func() (string, error) {
	if binary := os.Getenv("LEASEBUS_BUF"); binary != "" {
		return filepath.Abs(binary)
	}
	cmd := exec.Command("go", "tool", "-modfile=tools/go.mod", "-n", "buf") // -n: print what would be run
	cmd.Dir = ".."
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
})

func buf(t *testing.T) string {
	t.Helper()
	binary, err := bufBinary()
	if err != nil {
		t.Fatalf("buf cannot be had: %v; set LEASEBUS_BUF to a binary of it", err)
	}
	return binary
}

// compile compiles the proto files of some folders below root, each a place to import from, as buf does for a plugin.
func compile(t *testing.T, root string, folders ...string) *descriptorpb.FileDescriptorSet {
	t.Helper()
	modules := make([]map[string]string, 0, len(folders))
	for _, folder := range folders {
		modules = append(modules, map[string]string{"path": folder})
	}
	config, err := json.Marshal(map[string]any{"version": "v2", "modules": modules})
	if err != nil {
		t.Fatal(err)
	}
	output := filepath.Join(t.TempDir(), "descriptors.binpb")
	run(t, checkout(t), nil, buf(t), "build", root, "--config", string(config), "--as-file-descriptor-set", "-o", output)
	encoded, err := os.ReadFile(output)
	if err != nil {
		t.Fatal(err)
	}
	set := &descriptorpb.FileDescriptorSet{}
	if err := proto.Unmarshal(encoded, set); err != nil {
		t.Fatal(err)
	}
	return set
}

// checkout is the folder of the module.
func checkout(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// run runs a command and returns what it prints to its standard output.
func run(t *testing.T, dir string, stdin []byte, command ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Dir = dir
	cmd.Stdin = bytes.NewReader(stdin)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			out = append(out, exit.Stderr...)
		}
		t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
	return out
}

// request asks for the selected files.
func request(set *descriptorpb.FileDescriptorSet, parameter string, selected func(file string) bool) *pluginpb.CodeGeneratorRequest {
	req := &pluginpb.CodeGeneratorRequest{ProtoFile: set.GetFile()}
	for _, file := range set.GetFile() {
		if selected(file.GetName()) {
			req.FileToGenerate = append(req.FileToGenerate, file.GetName())
		}
	}
	if parameter != "" {
		parameter = "," + parameter
	}
	req.Parameter = proto.String("paths=source_relative" + parameter)
	return req
}

// generate runs protoc-gen-leasebus in this process, with nothing passed but bytes, as buf would.
func generate(t *testing.T, req *pluginpb.CodeGeneratorRequest) *pluginpb.CodeGeneratorResponse {
	t.Helper()
	encoded, err := proto.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	decoded := &pluginpb.CodeGeneratorRequest{}
	if err := proto.Unmarshal(encoded, decoded); err != nil {
		t.Fatal(err)
	}
	settings := gen.NewParameters()
	plugin, err := protogen.Options{ParamFunc: settings.Set}.New(decoded)
	if err != nil {
		return &pluginpb.CodeGeneratorResponse{Error: proto.String(err.Error())}
	}
	if err := gen.Generate(plugin, settings); err != nil {
		plugin.Error(err)
	}
	return plugin.Response()
}

// runProtocGenGo runs protoc-gen-go, and returns the files that it writes.
func runProtocGenGo(t *testing.T, req *pluginpb.CodeGeneratorRequest) map[string]string {
	t.Helper()
	encoded, err := proto.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	response := &pluginpb.CodeGeneratorResponse{}
	if err := proto.Unmarshal(run(t, checkout(t), encoded, "go", "tool", "protoc-gen-go"), response); err != nil {
		t.Fatal(err)
	}
	return filesOf(t, response)
}

func filesOf(t *testing.T, response *pluginpb.CodeGeneratorResponse) map[string]string {
	t.Helper()
	if response.Error != nil {
		t.Fatal(response.GetError())
	}
	files := map[string]string{}
	for _, file := range response.GetFile() {
		files[file.GetName()] = file.GetContent()
	}
	return files
}
