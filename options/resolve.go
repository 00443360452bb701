package options

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/reflect/protoreflect"

	leasebusv1 "github.com/leasebus/leasebus/options/leasebus/v1"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// ErrNotAnnotated is matched by the error of [Resolve] for a message without the option (leasebus.v1.message).
var ErrNotAnnotated = errors.New("has no option (leasebus.v1.message)")

// Resolve returns the policy of a message: its own annotation over the defaults of its file over the built-in ones.
//
// The error lists everything that is wrong with the annotation, each entry a [Problem]. For a message that has no
// annotation the error matches [ErrNotAnnotated], so a caller that expects one need not look twice.
// The policy is nil if and only if the error is not.
func Resolve(md protoreflect.MessageDescriptor) (*leasebus.Policy, error) {
	a, ok := Read(md)
	if !ok {
		return nil, fmt.Errorf("leasebus: message %s %w", md.FullName(), ErrNotAnnotated)
	}
	if len(a.Problems) > 0 {
		errs := make([]error, len(a.Problems))
		for i, problem := range a.Problems {
			errs[i] = problem
		}
		return nil, errors.Join(errs...)
	}
	return &a.Policy, nil
}

// An Annotation is what a message, its fields and its file say about its delivery, resolved.
type Annotation struct {
	// Message is the annotated message.
	Message protoreflect.MessageDescriptor
	// Policy is complete; it can be relied upon only if there are no problems.
	Policy leasebus.Policy
	// Problems are sorted by their place.
	Problems []Problem

	own      *leasebusv1.MessageOptions
	defaults *leasebusv1.Defaults
}

// Read resolves the annotation of a message and keeps what is needed to point at its parts.
// The answer is false for a message that says nothing about leasebus: neither it nor any of its fields.
func Read(md protoreflect.MessageDescriptor) (*Annotation, bool) {
	a := &Annotation{Message: md}
	found := a.read()
	slices.SortFunc(a.Problems, Problem.Compare)
	return a, found
}

func (a *Annotation) read() bool {
	md := a.Message
	own, annotated, err := decode(md.Options(), messageOption)
	keys := a.readKeys()
	switch {
	case err != nil:
		a.reportf(a.locate(""), "%v", err)
		return true
	case !annotated:
		for _, key := range keys {
			a.reportf(locateField(key.field, key.role), "field %s is marked as %s, but the message has no option (leasebus.v1.message); add it, or take the mark away",
				key.field.Name(), key.role)
		}
		return len(a.Problems) > 0
	}
	a.own = own
	a.checkPlace()
	if a.readDefaults(); len(a.Problems) > 0 {
		return true // what follows from a misunderstood annotation would only confuse
	}

	merged := &leasebusv1.MessageOptions{}
	merge(merged.ProtoReflect(), inherited(a.defaults, own).ProtoReflect())
	merge(merged.ProtoReflect(), own.ProtoReflect())
	a.checkDurations(merged.ProtoReflect(), "")
	a.Policy = policyOf(md.FullName(), merged)
	a.applyKeys(keys)
	a.checkPolicy(merged)
	return true
}

func (a *Annotation) readDefaults() {
	file := a.Message.ParentFile()
	options, _, err := decode(file.Options(), fileOption)
	if err != nil {
		a.reportf(locateDefault(file), "%v", err)
		return
	}
	a.defaults = options.GetDefaults()
}

// checkPlace refuses the messages that nobody can publish by themselves.
func (a *Annotation) checkPlace() {
	switch {
	case a.Message.IsMapEntry():
		a.reportf(a.locate(""), "the option (leasebus.v1.message) stands on a map entry; allowed are messages that are no part of a map or group")
	case isGroup(a.Message):
		a.reportf(a.locate(""), "the option (leasebus.v1.message) stands on a group; allowed are messages that are no part of a map or group")
	}
}

// checkPolicy reports what the policy itself finds wrong, in the words of the annotation.
func (a *Annotation) checkPolicy(merged *leasebusv1.MessageOptions) {
	retry := merged.GetRetry()
	if retry.GetNone() != nil && retry.MaxAttempts != nil && retry.GetMaxAttempts() != 1 {
		a.Problems = append(a.Problems, a.Problem("retry.max_attempts",
			"%d stands beside retry.none, which is one attempt; allowed is 1, or another kind of retry", retry.GetMaxAttempts()))
		return
	}
	contradictory := map[string]bool{}
	for _, problem := range a.Problems {
		contradictory[problem.Setting] = true
	}
	wrong := maps.Clone(contradictory)
	for _, problem := range a.Policy.Problems() {
		setting := problem.Setting
		if setting == "retry.fixed.delay" && retry.GetFixed() == nil {
			setting = "retry.exponential.initial" // a multiplier of 1 makes the two one in a policy
		}
		source, follows := sourceOf[setting]
		if contradictory[setting] || follows && wrong[source] && !isGiven(merged.ProtoReflect(), settingNames(setting)) {
			continue // that has been told, or is wrong only because what it follows from is
		}
		wrong[setting] = true
		a.Problems = append(a.Problems, a.Problem(setting, "%s", problem.Text))
	}
}

// sourceOf tells from which setting another one takes its default.
var sourceOf = map[string]string{
	"lease.heartbeat":   "lease.duration",
	"dead_letter.queue": "queue",
}

// isGroup tells whether a message is the type of a proto2 group, which is declared and used in one place.
// In editions a field may have the encoding of a group while its message is one like any other.
func isGroup(md protoreflect.MessageDescriptor) bool {
	if md.ParentFile() == nil || md.ParentFile().Syntax() != protoreflect.Proto2 {
		return false
	}
	declaresGroup := func(fields interface {
		Len() int
		Get(int) protoreflect.FieldDescriptor
	},
	) bool {
		for i := range fields.Len() {
			if f := fields.Get(i); f.Kind() == protoreflect.GroupKind && f.Message().FullName() == md.FullName() {
				return true
			}
		}
		return false
	}
	switch scope := md.Parent().(type) {
	case protoreflect.MessageDescriptor:
		return declaresGroup(scope.Fields()) || declaresGroup(scope.Extensions())
	case protoreflect.FileDescriptor:
		return declaresGroup(scope.Extensions())
	default:
		return false
	}
}
