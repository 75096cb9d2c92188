#!/bin/sh
# Builds the images graphllm:VERSION-cpu and graphllm:VERSION-cuda, or those named: `deploy/build_images.sh cpu`.
# IMAGE is another name, such as registry.example.com/graphllm.
set -eu
cd "$(dirname "$0")/.."
image=${IMAGE:-graphllm}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' graphllm/version.py)
[ $# -gt 0 ] || set -- cpu cuda
for kind in "$@"; do
    [ -f "deploy/Dockerfile.$kind" ] || { echo "no such image: $kind; there are cpu and cuda" >&2; exit 2; }
    docker build -f "deploy/Dockerfile.$kind" -t "$image:$version-$kind" .
done
