#!/usr/bin/env bash
# Compares the annotations with those of the last release, or of main where there is no release yet: a change that
# would break proto files in use fails. Prints what it compares with.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${BUF:?is the path of buf; run make lint}"

# base prints the revision to compare with; nothing if there is none that has annotations.
base() {
  local revision
  for revision in "$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)" main origin/main; do
    if [ -n "$revision" ] && git cat-file -e "$revision:options/leasebus/v1/options.proto" 2>/dev/null; then
      echo "$revision"
      return
    fi
  done
}

against=$(base)
if [ -z "$against" ]; then
  echo "buf breaking: neither a release nor main has annotations to compare with."
  exit 0
fi
echo "buf breaking: comparing the annotations with $against"
git archive --format=tar "$against" buf.yaml options | "$BUF" breaking options --against '-#format=tar,subdir=options'
