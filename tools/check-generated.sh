#!/usr/bin/env bash
# Generates everything again and fails if that changes the working tree. What was uncommitted before does not matter.
set -euo pipefail
cd "$(dirname "$0")/.."

index=$(mktemp)
trap 'rm -f "$index"' EXIT

# snapshot prints the hash of the working tree as it is, without touching the index.
snapshot() {
  cp "$(git rev-parse --git-path index)" "$index"
  GIT_INDEX_FILE=$index git add --all
  GIT_INDEX_FILE=$index git write-tree
}

before=$(snapshot)
"${MAKE:-make}" --no-print-directory generate
after=$(snapshot)

if [ "$before" != "$after" ]; then
  echo "Generated files were stale. They are up to date now; commit them:" >&2
  git --no-pager diff --stat "$before" "$after" >&2
  exit 1
fi
echo "Generated files are up to date."
