#!/usr/bin/env bash
# Trains on one machine, or on several together, over ssh.
#
#   scripts/ssh_hosts.sh run --hosts HOST[,HOST...] [options] CONFIG [key=value ...]
#   scripts/ssh_hosts.sh logs|stop --hosts HOST[,HOST...] [--name NAME]
#
# run starts one process on each host, with all devices of the host, and shows what they print. Ctrl-C ends the showing,
# not the training; `logs` shows it again, from its start. `stop` lets the run save and leave (exit status 5); a second
# time it leaves at once. The same `run` then resumes. Exit status: that of the training; where it differs between the
# hosts, the lowest that is not 0.
#
#   --hosts HOST[,HOST...]  as ssh knows them ([user@]host, or names of ~/.ssh/config), without asking for a password
#   --command preflight     check that it could train, in its place (train)
#   --name NAME             of the job on the hosts (maxlite)
#   --dir DIRECTORY         where maxlite is on the hosts, from the home directory on (maxlite)
#   --python PYTHON         what runs it there, from --dir on (.venv/bin/python)
#   --coordinator ADDRESS   the first host, as the others reach it (its name in --hosts)
#   --port PORT             where the first host is met by the others (8476)
#   --install EXTRAS        first copy the committed source there and install it: cuda, tpu, or dev
#   --dry-run               print the commands, run none
#
# What must exist first: base_output_directory, and what text_files names, at the same path on every host
# (base_output_directory shared, as by NFS); with several hosts, the port open between them.

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

action=${1-}
case $action in
  run | logs | stop) shift ;;
  -h | --help) ;;
  *) fail "expected run, logs or stop; see $0 --help" ;;
esac
hosts="" command=train name=maxlite dir=maxlite python=.venv/bin/python coordinator="" port=8476 install=""
read_options "--hosts --command --name --dir --python --coordinator --port --install" "" "$@"
need --hosts "$hosts"
need_number --port "$port"
need_command "$command"
[[ $name =~ ^[A-Za-z0-9._-]+$ ]] || fail "--name $name: letters, digits, '.', '_' and '-' only"
IFS=, read -r -a all <<<"$hosts"
labels=()
for index in "${!all[@]}"; do
  [[ ${all[index]} =~ ^[A-Za-z0-9] ]] || fail "--hosts $hosts: '${all[index]}' is no host"
  labels+=("$index:${all[index]}")
done

on_host() { # LABEL COMMAND
  run ssh -n -o BatchMode=yes "${1#*:}" "$2"
}

install_on() {
  run scp -q -o BatchMode=yes "$archive" "${1#*:}:maxlite-source.tar.gz"
  # shellcheck disable=SC2016
  on_host "$1" "$(remote_install "$dir" maxlite-source.tar.gz "$install")"
}

start_on() {
  local keys=()
  if ((${#all[@]} > 1)); then
    keys=("coordinator_address=$coordinator:$port" "num_processes=${#all[@]}" "process_id=${1%%:*}")
  fi
  on_host "$1" "$(remote_start "$name-${1%%:*}" "$dir" "$python" -m "maxlite.$command" "${rest[@]}" "${keys[@]}")"
}

follow_on() {
  on_host "$1" "$(remote_follow "$name-${1%%:*}")"
}

stop_on() {
  on_host "$1" "$(remote_stop "$name-${1%%:*}")"
}

if [[ $action == run ]]; then
  ((${#rest[@]})) || fail "no CONFIG given; see $0 --help"
  coordinator=${coordinator:-${all[0]#*@}}
  if [[ -n $install ]]; then
    make_archive
    in_parallel install_on "${labels[@]}"
  fi
  in_parallel start_on "${labels[@]}"
elif ((${#rest[@]})); then
  fail "$action takes no CONFIG"
fi
if [[ $action == stop ]]; then
  in_parallel stop_on "${labels[@]}"
else
  in_parallel follow_on "${labels[@]}"
fi
