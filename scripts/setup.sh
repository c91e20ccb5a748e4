# Sourced by the other scripts: makes ./.venv (or $VENV) with this project in it.
#
#   extras   what to install, such as "dev,tpu"; empty for none
#
# Takes $PYTHON, else the version of .python-version, else the default python3.

setup_environment() {
    local extras=$1 venv=${VENV:-.venv} stamp python
    stamp="$venv/installed-${extras//,/-}"
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python) || {
            echo "No Python of version 3.11 or later was found; set PYTHON to one." >&2
            return 1
        }
        echo "Making $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    if [ ! "$stamp" -nt pyproject.toml ]; then
        echo "Installing tpu-embedding${extras:+[$extras]} and what it needs"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            --editable ".${extras:+[$extras]}"
        touch "$stamp"
    fi
    PATH="$PWD/$venv/bin:$PATH"
}

find_python() {
    local candidate wanted
    wanted=$(cat .python-version)
    for candidate in ${PYTHON:-"python$wanted" python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}
