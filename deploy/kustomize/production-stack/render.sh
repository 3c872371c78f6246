#!/bin/sh
# Rendered manifests on standard input, the same with Flipwatch in vLLM's pods on standard output.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/kustomization.yaml" "$here/sidecar.yaml" "$work"
cat >"$work/all.yaml"
kubectl kustomize "$work"
