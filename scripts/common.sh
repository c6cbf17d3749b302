# shellcheck shell=bash
# What the launch scripts share; sourced by them, not run.

set -euo pipefail

dry_run=false
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

note() {
  printf '%s\n' "$*" >&2
}

# The comment at the top of the script.
usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# The words as any POSIX shell reads them back. (printf %q may write $'...', which only some shells know.)
quote() {
  local word words=()
  for word; do
    if [[ ! $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      word="'${word//\'/"'\\''"}'"
    fi
    words+=("$word")
  done
  printf '%s' "${words[*]}"
}

# Runs a command, or says which.
run() {
  if $dry_run; then
    printf '%s\n' "$(quote "$@")"
  else
    "$@"
  fi
}

# read_options "NAME ..." "FLAG ..." ARGUMENT ...: sets a variable for each option, `rest` to the other words.
# `--a-b X` and `--a-b=X` set a_b=X; a flag sets true. Everything after the first other word is left alone.
read_options() {
  local _valued=" $1 " _flags=" $2 --dry-run " _name _value
  shift 2
  rest=()
  while (($#)); do
    case $1 in
      -h | --help)
        usage
        exit 0
        ;;
      --)
        shift
        break
        ;;
      -*) ;;
      *) break ;;
    esac
    _name=${1%%=*}
    if [[ $_flags == *" $_name "* && $1 != *=* ]]; then
      _value=true
    elif [[ $_valued == *" $_name "* && $1 == *=* ]]; then
      _value=${1#*=}
    elif [[ $_valued == *" $_name "* ]]; then
      (($# > 1)) || fail "$_name needs a value"
      _value=$2
      shift
    else
      fail "$1: no such option; see $0 --help"
    fi
    _name=${_name#--}
    printf -v "${_name//-/_}" %s "$_value"
    shift
  done
  rest=("$@")
}

need() { # OPTION VALUE
  [[ -n $2 ]] || fail "$1 is needed; see $0 --help"
}

need_number() { # OPTION VALUE
  [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 $2: expected a number of 1 or more"
}

need_command() { # VALUE: of --command
  [[ $1 == train || $1 == preflight ]] || fail "--command $1: expected train or preflight"
}

# in_parallel COMMAND LABEL ...: runs `COMMAND LABEL` for all labels at once, its lines under that label. Returns the
# lowest status that is not 0: where one process fails by itself (2), the others leave for its sake (3).
in_parallel() {
  local _each=$1 _label _pid _one _status=0 _pids=() # what is called sees these too
  shift
  if $dry_run; then
    for _label; do "$_each" "$_label"; done
    return
  fi
  set -m # each in a process group of its own, to be ended as a whole
  trap 'kill -- "${_pids[@]/#/-}" 2>/dev/null; exit 130' INT TERM
  for _label; do
    { "$_each" "$_label" 2>&1 | under "$_label"; } &
    _pids+=($!)
  done
  for _pid in "${_pids[@]}"; do
    _one=0
    wait "$_pid" || _one=$?
    if ((_one != 0 && (_status == 0 || _one < _status))); then _status=$_one; fi
  done
  trap - INT TERM
  set +m
  return "$_status"
}

under() { # LABEL: puts it before every line
  local line
  while IFS= read -r line || [[ -n $line ]]; do printf '[%s] %s\n' "$1" "$line"; done
}

# --- Commands for the machines, as one line of POSIX shell each. A job is a directory there with its log, process
# and exit status, so that it outlives the connection that started it.

job_directory() { # NAME
  # shellcheck disable=SC2016 # to be expanded there
  printf 'job=$HOME/.maxlite/jobs/%s' "$(quote "$1")"
}

# remote_start NAME DIRECTORY COMMAND ...: a POSIX shell keeps the exit status; TERM is for its child.
remote_start() {
  local name=$1 directory=$2
  shift 2
  job_directory "$name"
  # shellcheck disable=SC2016
  printf '; if [ -e "$job/pid" ] && [ ! -e "$job/status" ] && kill -0 "$(cat "$job/pid")" 2>/dev/null; then '
  printf 'echo "error: job %s is running here; stop it first" >&2; exit 2; fi; ' "$name"
  # shellcheck disable=SC2016
  printf 'mkdir -p "$job" && rm -f "$job/status" && cd %s || exit 2; ' "$(quote "$directory")"
  # shellcheck disable=SC2016
  printf 'setsid sh -c %s "$job" %s >"$job/log" 2>&1 </dev/null & echo $! >"$job/pid"' \
    "'trap : TERM; \"\$@\"; echo \$? >\"\$0/status\"'" "$(quote "$@")"
}

# remote_follow NAME: shows the log from its start until the job ends, and leaves with its exit status.
remote_follow() {
  job_directory "$1"
  # shellcheck disable=SC2016
  printf '; [ -e "$job/pid" ] || { echo "error: no job %s here" >&2; exit 2; }; ' "$1"
  # shellcheck disable=SC2016
  printf 'tail -n +1 -f --pid="$(cat "$job/pid")" "$job/log"; [ -e "$job/status" ] || { '
  # shellcheck disable=SC2016
  printf 'echo "error: job %s was killed" >&2; exit 137; }; exit "$(cat "$job/status")"' "$1"
}

# remote_stop NAME: asks the job to save and leave; a second time makes it leave at once.
remote_stop() {
  job_directory "$1"
  # shellcheck disable=SC2016
  printf '; kill -TERM "-$(cat "$job/pid")"'
}

# remote_install DIRECTORY ARCHIVE EXTRAS: unpacks the source there and installs it in DIRECTORY/.venv, with a Python
# that is new enough, which uv brings where the machine has none.
remote_install() {
  local directory archive
  directory=$(quote "$1") archive=$(quote "$2")
  printf 'mkdir -p %s && tar -xzf %s -C %s && cd %s && ' "$directory" "$archive" "$directory" "$directory"
  # shellcheck disable=SC2016 # to be expanded there
  printf 'export PATH="$HOME/.local/bin:$PATH" PIP_BREAK_SYSTEM_PACKAGES=1 && '
  printf '{ command -v uv >/dev/null || python3 -m pip install --quiet --user uv; } && '
  printf 'uv venv --quiet --allow-existing --python 3.12 .venv && '
  printf 'uv pip install --quiet --python .venv/bin/python -e %s' "$(quote ".[$3]")"
}

# The source as it was committed, as a file to be copied. Sets `archive`; removed at the end.
make_archive() {
  local folder=/tmp/maxlite-source
  $dry_run || folder=$(mktemp -d)
  archive=$folder/maxlite.tar.gz
  # shellcheck disable=SC2064 # the folder of now
  $dry_run || trap "rm -rf $(quote "$folder")" EXIT
  [[ -z $(git -C "$root" status --porcelain --untracked-files=no) ]] ||
    note "note: what is not committed in $root is not installed"
  run git -C "$root" archive --format=tar.gz --output="$archive" HEAD
}
