# Sourced by all other scripts: creates ./.venv (or $VENV) and installs this project.
#
#   setup_environment EXTRAS    extras such as "dev,tpu", or an empty string
#
# Uses $PYTHON, or else the version in .python-version, or else the default python3. If
# none of these is recent enough, as on a Cloud TPU VM, uv downloads one, without root.

# Two functions for a script's options, to be called in the project's folder:
#
#   help_on_request "$@"        for --help or -h, prints the script's first comment and
#                               ends the script
#   reject_option OPTION        ends the script with an error

help_on_request() {
    case "${1-}" in
    -h | --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "scripts/$(basename "$0")"
        exit 0
        ;;
    esac
}

reject_option() {
    local script
    script=scripts/$(basename "$0")
    echo "$script: unknown option $1; see $script --help" >&2
    exit 2
}

setup_environment() {
    local extras=$1 venv=${VENV:-.venv} python extra missing=
    if [ ! -x "$venv/bin/python" ]; then
        if python=$(find_python); then
            echo "Creating $venv with $("$python" --version)"
            "$python" -m venv "$venv"
        elif [ "${PYTHON-}" ] || ! create_with_uv "$venv"; then
            echo "Found no Python 3.11 or later, and uv installed none." \
                "Set PYTHON to one." >&2
            return 1
        fi
    fi
    # One stamp per extra, so an environment with more extras needs no change.
    for extra in core ${extras//,/ }; do
        [ "$venv/installed-$extra" -nt pyproject.toml ] || missing=yes
    done
    if [ "$missing" ]; then
        echo "Installing tpu-embedding${extras:+[$extras]} and its dependencies"
        install "$venv/bin/python" --editable ".${extras:+[$extras]}"
        for extra in core ${extras//,/ }; do touch "$venv/installed-$extra"; done
    fi
    PATH="$PWD/$venv/bin:$PATH"
}

# Installs with uv, in a third of pip's time. If uv fails, pip may still succeed, because
# only pip reads an index from pip.conf.
install() {
    local python=$1 pip
    shift
    # -qq prints errors, but no warnings about indexes.
    pip="$python -m pip install -qq --disable-pip-version-check"
    if $pip uv && "$python" -m uv pip install --quiet --python "$python" "$@"; then
        return
    fi
    $pip "$@"
}

# Creates an environment with an interpreter that uv downloads. Needs any pip.
create_with_uv() {
    echo "Creating $1 with Python $(cat .python-version), which uv installs"
    python3 -m pip install -qq --disable-pip-version-check --upgrade --target .uv uv &&
        .uv/bin/uv venv --quiet --seed --python "$(cat .python-version)" "$1"
}

find_python() {
    find_interpreter ${PYTHON:-"python$(cat .python-version)" python3 python}
}

# Prints the first of the given interpreters that can create an environment.
find_interpreter() {
    local candidate
    for candidate in "$@"; do
        if "$candidate" -c 'import ensurepip, sys, venv
sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}
