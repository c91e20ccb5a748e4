# Sourced by the other scripts: makes ./.venv (or $VENV) with this project in it.
#
#   setup_environment EXTRAS    such as "dev,tpu"; empty for none
#
# Takes $PYTHON, else the version of .python-version, else the default python3.

# Two functions for the options of a script, to be called in the project's folder:
#
#   help_on_request "$@"        prints the script's first comment for --help or -h, and
#                               ends the script
#   refuse_option OPTION        ends the script with an error

help_on_request() {
    case "${1-}" in
    -h | --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "scripts/$(basename "$0")"
        exit 0
        ;;
    esac
}

refuse_option() {
    local script
    script=scripts/$(basename "$0")
    echo "$script: unknown option $1; see $script --help" >&2
    exit 2
}

setup_environment() {
    local extras=$1 venv=${VENV:-.venv} python extra missing=
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python) || {
            echo "No Python of version 3.11 or later was found; set PYTHON to one." >&2
            return 1
        }
        echo "Making $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    # One stamp per extra: an environment that has more is left as it is.
    for extra in core ${extras//,/ }; do
        [ "$venv/installed-$extra" -nt pyproject.toml ] || missing=yes
    done
    if [ "$missing" ]; then
        echo "Installing tpu-embedding${extras:+[$extras]} and what it needs"
        install "$venv/bin/python" --editable ".${extras:+[$extras]}"
        for extra in core ${extras//,/ }; do touch "$venv/installed-$extra"; done
    fi
    PATH="$PWD/$venv/bin:$PATH"
}

# Installs by uv, in a third of pip's time. Where uv finds nothing, pip may: only pip
# reads an index from pip.conf.
install() {
    local python=$1 pip
    shift
    # Twice quiet: errors are printed, and warnings about indexes are not.
    pip="$python -m pip install -qq --disable-pip-version-check"
    if $pip uv && "$python" -m uv pip install --quiet --python "$python" "$@"; then
        return
    fi
    $pip "$@"
}

find_python() {
    find_interpreter ${PYTHON:-"python$(cat .python-version)" python3 python}
}

# Prints the first of the given interpreters that can make an environment.
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
