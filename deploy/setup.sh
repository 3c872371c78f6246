#!/usr/bin/env bash
# Sets up everything that `make demo`, `make up` and `make test` need: Debian packages, .venv with the pinned
# packages, Flipwatch itself (editable), and the model.  Every step looks first and does nothing when it is done.
#
#   PYTHON           the Python to use, 3.11 (default: python3.11, else python3)
#   FLIPWATCH_CACHE  where the model is kept (default: $XDG_CACHE_HOME/flipwatch, else ~/.cache/flipwatch)
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup %4ds  %s\n' "$SECONDS" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 2; }

lock=requirements/lock.txt
venv=.venv
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
cache=${FLIPWATCH_CACHE:-${XDG_CACHE_HOME:-${HOME:-$PWD}/.cache}/flipwatch}

debian_packages() {
    local missing=()
    [ -n "$python" ] || missing+=(python3)
    "${python:-false}" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
    # torch.compile builds small C++ programs at vLLM's start.
    "${python:-false}" -c 'import pathlib, sysconfig, sys
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' || missing+=(python3-dev)
    command -v g++ >/dev/null || missing+=(g++)
    command -v lscpu >/dev/null || missing+=(util-linux)
    { ldconfig -p 2>/dev/null || /sbin/ldconfig -p; } | grep -q 'libnuma\.so\.1' || missing+=(libnuma1)
    # For the tests: rules, configuration, and the loop from a fault over an alert to its repair, with the real programs.
    command -v promtool >/dev/null || missing+=(prometheus)
    command -v amtool >/dev/null || missing+=(prometheus-alertmanager)
    [ ${#missing[@]} -gt 0 ] || { say "Debian packages: present"; return; }
    local install="apt-get install -y --no-install-recommends ${missing[*]}"
    command -v apt-get >/dev/null || die "missing: ${missing[*]} (Debian names). Install them and run this again."
    [ "$(id -u)" = 0 ] || die "missing Debian packages. Run this as root, then try again:  $install"
    say "Debian packages: installing ${missing[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive $install; } >/dev/null \
        || die "apt-get could not install ${missing[*]}."
    [ -n "$python" ] || python=$(command -v python3)
}

virtual_environment() {
    [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = 3.11 ] \
        || die "$python is not Python 3.11, which $lock is made for. Name one by PYTHON=/path/to/python3.11."
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        say "virtual environment: present"
    else
        say "virtual environment: making $venv"
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
}

# How far pip is, every 10 seconds: it is silent for minutes otherwise.
watch_pip() {
    local total packages
    total=$(grep -c '^[^#]' "$lock")
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    while kill -0 "$1" 2>/dev/null; do
        sleep 1
        if [ $((SECONDS % 10)) = 0 ]; then
            say "  $(grep -cE '^(Collecting|Processing) ' "$2" || true) of $total fetched," \
                "$(find "$packages" -maxdepth 1 -name '*.dist-info' | wc -l) installed"
        fi
    done
}

pinned_packages() {
    local wanted stamp=$venv/.stamp-lock log=$venv/pip.log
    wanted=$(sha256sum "$lock")
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && { say "pinned packages: present"; return; }
    say "pinned packages: installing $(grep -c '^[^#]' "$lock") (3.5 GB on disk), pip's log is $log"
    rm -f "$stamp"
    # No resolver: the list is complete.  No byte-compiling of everything: Python compiles what it imports.
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        --no-deps --no-compile -r "$lock" >"$log" 2>&1 &
    local pip=$!
    trap 'kill "$pip" 2>/dev/null' INT TERM
    watch_pip "$pip" "$log"
    wait "$pip" || { grep -E '^ERROR' "$log" >&2 || tail -n 20 "$log" >&2
                     die "pip failed; the whole log is $log"; }
    trap - INT TERM
    "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' \
        || die "the installed torch does not import or is no CPU build; see the head of $lock."
    say "pinned packages: first import of vLLM"
    "$venv/bin/python" -c 'import vllm.entrypoints.openai.api_server' >>"$log" 2>&1 \
        || die "the installed vLLM does not import; the whole log is $log"
    echo "$wanted" >"$stamp"
}

flipwatch_itself() {
    local wanted stamp=$venv/.stamp-flipwatch
    wanted="$PWD $(sha256sum pyproject.toml)"
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && { say "flipwatch: present"; return; }
    say "flipwatch: installing, editable"
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check -q \
        --no-deps --no-build-isolation -e .
    echo "$wanted" >"$stamp"
}

model() {
    local folder=$cache/smollm2-135m-instruct-bf16
    if [ -f "$folder/config.json" ]; then
        say "model: present in $folder"
    else
        say "model: unpacking SmolLM2-135M-Instruct into $folder (half a minute)"
        "$venv/bin/python" deploy/make_model.py "$folder"
    fi
    ln -sfn "$folder" "$venv/model"
}

debian_packages
virtual_environment
pinned_packages
flipwatch_itself
model
say "ready"
