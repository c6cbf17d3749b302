#!/usr/bin/env bash
# Trains on Cloud TPU VMs: one slice, or several that are queued and come together.
#
#   scripts/tpu_vm.sh run --name NAME --zone ZONE --type TYPE [options] CONFIG [key=value ...]
#   scripts/tpu_vm.sh logs|stop|status|delete --name NAME --zone ZONE [--slices N] [options]
#
# run asks for the TPUs unless NAME has them already (what was preempted is asked for anew), waits for them, installs
# the committed source on every worker, starts the training there and shows what it prints. Ctrl-C ends the showing,
# not the training; `logs` shows it again, from its start. `stop` lets the run save and leave (exit status 5); a second
# time it leaves at once. The same `run` then resumes, on the TPUs that it has. They cost money until `delete`.
#
#   --name NAME              of the queued resource; its slices are NAME, or NAME-0, NAME-1 ...
#   --zone ZONE              as in us-east5-a
#   --project PROJECT        (gcloud's own)
#   --type TYPE              accelerator type of one slice, as in v5p-128, v5litepod-256, v6e-256
#   --command preflight      check that it could train, in its place (train)
#   --slices N               (1)
#   --runtime-version V      the VMs' image (the one for the type)
#   --spot, --reserved       the kind of capacity
#   --internal-ip            reach the VMs by their internal addresses
#   --startup-script FILE    run by root on every worker when it boots, as to mount the shared directory
#   --no-install             the workers have the source already
#   --dry-run                print the commands, run none
#
# What must exist first: gcloud, logged in, with the TPU API enabled and quota for the type in the zone; its ssh key
# in an agent (ssh-add ~/.ssh/google_compute_engine); and base_output_directory as a directory that all workers share
# (Filestore or another NFS), mounted by --startup-script or in the image.

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

readonly POLL_SECONDS=30
directory=maxlite

action=${1-}
case $action in
  run | logs | stop | status | delete) shift ;;
  -h | --help) ;;
  *) fail "expected run, logs, stop, status or delete; see $0 --help" ;;
esac
name="" zone="" project="" type="" command=train slices=1 runtime_version="" startup_script=""
spot=false reserved=false internal_ip=false no_install=false
read_options "--name --zone --project --type --command --slices --runtime-version --startup-script" \
  "--spot --reserved --internal-ip --no-install" "$@"
need --name "$name"
need --zone "$zone"
need_number --slices "$slices"
need_command "$command"
[[ $name =~ ^[a-z]([a-z0-9-]{0,50}[a-z0-9])?$ ]] ||
  fail "--name $name: small letters, digits and '-' only, a letter first, at most 52"
where=(--zone "$zone")
[[ -z $project ]] || where+=(--project "$project")
nodes=("$name")
if ((slices > 1)); then
  nodes=()
  for ((slice = 0; slice < slices; slice++)); do nodes+=("$name-$slice"); done
fi

tpus() {
  run gcloud compute tpus "$@" "${where[@]}"
}

# The queued resource's state; nothing where there is none. (`describe` would fail for that as for anything else.)
state() {
  tpus queued-resources list --filter "name~/$name\$" --format "value(state.state)"
}

create() {
  local options=(--accelerator-type "$type" --runtime-version "$runtime_version")
  if ((slices > 1)); then
    options+=(--node-count "$slices" --node-prefix "$name")
  else
    options+=(--node-id "$name")
  fi
  if $spot; then options+=(--spot); fi
  if $reserved; then options+=(--reserved); fi
  if $internal_ip; then options+=(--internal-ips); fi
  [[ -z $startup_script ]] || options+=(--metadata-from-file "startup-script=$startup_script")
  tpus queued-resources create "$name" "${options[@]}"
}

delete() {
  tpus queued-resources delete "$name" --force --quiet
}

# Until the TPUs are there.
require_tpus() {
  local now last=""
  if $dry_run; then
    state
    create
    state
    return
  fi
  now=$(state)
  case $now in
    FAILED | SUSPENDED)
      note "$name is $now: it has no TPUs any more, and is asked for anew"
      delete
      create
      ;;
    "") create ;;
  esac
  while now=$(state) && [[ $now != ACTIVE ]]; do
    [[ $now == "$last" ]] || note "$name is ${now:-not there yet}; waiting"
    case $now in
      FAILED | SUSPENDED | SUSPENDING | DELETING) fail "$name is $now; try again, or with another type or zone" ;;
    esac
    last=$now
    sleep "$POLL_SECONDS"
  done
}

default_runtime_version() {
  case $type in
    v2-* | v3-* | v4-*) printf 'tpu-ubuntu2204-base' ;;
    v5litepod-*) printf 'v2-alpha-tpuv5-lite' ;;
    v5p-*) printf 'v2-alpha-tpuv5' ;;
    v6e-*) printf 'v2-alpha-tpuv6e' ;;
    *) fail "--type $type: give its --runtime-version too" ;;
  esac
}

on_workers() { # NODE COMMAND
  local options=(--worker all --command "$2")
  if $internal_ip; then options+=(--internal-ip); fi
  tpus tpu-vm ssh "$1" "${options[@]}"
}

install_on() {
  local options=(--worker all)
  if $internal_ip; then options+=(--internal-ip); fi
  tpus tpu-vm scp "$archive" "$1:maxlite-source.tar.gz" "${options[@]}"
  on_workers "$1" "$(remote_install "$directory" maxlite-source.tar.gz tpu)"
}

start_on() { # the processes of a TPU pod find one another
  on_workers "$1" "$(remote_start "$name" "$directory" .venv/bin/python -m "maxlite.$command" "${rest[@]}")"
}

follow_on() {
  on_workers "$1" "$(remote_follow "$name")"
}

stop_on() {
  on_workers "$1" "$(remote_stop "$name")"
}

if [[ $action != run ]] && ((${#rest[@]})); then fail "$action takes no CONFIG"; fi
case $action in
  run)
    need --type "$type"
    ((${#rest[@]})) || fail "no CONFIG given; see $0 --help"
    runtime_version=${runtime_version:-$(default_runtime_version)}
    require_tpus
    if ! $no_install; then
      make_archive
      in_parallel install_on "${nodes[@]}"
    fi
    in_parallel start_on "${nodes[@]}"
    in_parallel follow_on "${nodes[@]}"
    ;;
  logs) in_parallel follow_on "${nodes[@]}" ;;
  stop) in_parallel stop_on "${nodes[@]}" ;;
  status) tpus queued-resources describe "$name" ;;
  delete) delete ;;
esac
