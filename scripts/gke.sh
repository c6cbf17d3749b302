#!/usr/bin/env bash
# Trains on Google Kubernetes Engine's TPUs, one or several slices, as a JobSet (scripts/jobset.yaml).
#
#   scripts/gke.sh run|manifest --name NAME --image IMAGE --accelerator A --topology T --claim CLAIM [options] \
#       CONFIG [key=value ...]
#   scripts/gke.sh logs|stop|resume|status|delete --name NAME [--slices N] [options]
#   scripts/gke.sh xpk --name NAME --image IMAGE --cluster CLUSTER --type TYPE [options] CONFIG [key=value ...]
#
# run starts the job, waits for its pods, and shows what they print. Ctrl-C ends the showing, not the training; `logs`
# shows it again. `stop` lets the run save and leave, and suspends the job; `resume` goes on. A process or node that is
# lost restarts all pods, which resume; a preemption too, without counting; a bad config (exit status 2) or a loss that
# is not finite (4) ends the job. manifest prints what run would apply. xpk starts the same with `xpk workload create`.
#
#   --name NAME              of the JobSet
#   --namespace N            (kubectl's own)
#   --image IMAGE            a container with maxlite and jax[tpu], and the config files in its working directory
#   --command preflight      check that it could train, in its place (train)
#   --accelerator A          the nodes' label, as in tpu-v5p-slice, tpu-v5-lite-podslice, tpu-v6e-slice
#   --topology T             of a slice, as in 4x4x4
#   --chips-per-host N       (4)
#   --slices N               (1)
#   --claim CLAIM            a PersistentVolumeClaim, ReadWriteMany, for base_output_directory
#   --mount DIRECTORY        where it is seen (/shared)
#   --max-restarts N         (20)
#   --grace-seconds N        for saving after SIGTERM, more than preemption_grace_seconds (60)
#   --cluster C, --type T, --zone Z, --project P    xpk's: the cluster, and the slice as in v5p-128
#   --storage STORAGE        xpk's: the name of the attached storage for base_output_directory
#   --dry-run                print the commands, run none
#
# What must exist first: kubectl connected to the cluster; JobSet 0.10 or newer in it (xpk installs it); for each slice
# a node pool with the accelerator and topology; the claim, bound to storage that all pods share (Filestore); the image.

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

action=${1-}
case $action in
  run | manifest | logs | stop | resume | status | delete | xpk) shift ;;
  -h | --help) ;;
  *) fail "expected run, manifest, logs, stop, resume, status, delete or xpk; see $0 --help" ;;
esac
name="" namespace="" command=train image="" accelerator="" topology="" chips_per_host=4 slices=1 claim="" mount=/shared
max_restarts=20 grace_seconds=60 cluster="" type="" zone="" project="" storage=""
read_options "--name --namespace --command --image --accelerator --topology --chips-per-host --slices --claim --mount \
--max-restarts --grace-seconds --cluster --type --zone --project --storage" "" "$@"
need --name "$name"
# Of the 63 letters of a pod's name the job set's own takes the last 23.
[[ $name =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
  fail "--name $name: small letters, digits and '-' only, a letter first, at most 40"
need_number --slices "$slices"
need_command "$command"
need_number --chips-per-host "$chips_per_host"
need_number --max-restarts "$max_restarts"
need_number --grace-seconds "$grace_seconds"

kube() {
  run kubectl ${namespace:+--namespace "$namespace"} "$@"
}

json() { # TEXT: as a JSON string, which YAML reads too
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

hosts_per_slice() {
  local chips=1 size
  [[ $topology =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] || fail "--topology $topology: expected sizes as in 4x4x4"
  for size in ${topology//x/ }; do ((chips *= size)); done
  ((chips % chips_per_host == 0)) ||
    fail "--topology $topology has $chips chips, no multiple of --chips-per-host $chips_per_host"
  printf %d "$((chips / chips_per_host))"
}

manifest() {
  local text word arguments=""
  for word in "${rest[@]}"; do
    # Kubernetes reads $(X) as the variable X, and $$ as $.
    word=${word//\$\(/\$\$\(}
    arguments+="${arguments:+, }$(json "$word")"
  done
  text=$(grep -v '^#' "$root/scripts/jobset.yaml")
  fill NAME "$name"
  fill COMMAND "$command"
  fill SLICES "$slices"
  fill HOSTS "$hosts"
  fill CHIPS_PER_HOST "$chips_per_host"
  fill MAX_RESTARTS "$max_restarts"
  fill GRACE_SECONDS "$grace_seconds"
  fill ACCELERATOR "$(json "$accelerator")"
  fill TOPOLOGY "$(json "$topology")"
  fill IMAGE "$(json "$image")"
  fill MOUNT "$(json "$mount")"
  fill CLAIM "$(json "$claim")"
  fill ARGUMENTS "[$arguments]" # last, so that what is in them stays as it is
  printf '%s\n' "$text"
}

fill() { # NAME VALUE: for manifest
  text=${text//"\${$1}"/"$2"}
}

apply() {
  if $dry_run; then
    printf '%s <<'\''EOF'\''\n%s\nEOF\n' "$(kube apply --filename -)" "$(manifest)"
  else
    manifest | kube apply --filename -
  fi
}

logs() {
  kube wait jobset "$name" --for "jsonpath={.status.replicatedJobsStatus[0].ready}=$slices" --timeout 24h
  kube logs --selector "jobset.sigs.k8s.io/jobset-name=$name" --follow --prefix --tail -1 --max-log-requests 2000
}

suspend() { # true or false
  kube patch jobset "$name" --type merge --patch "{\"spec\":{\"suspend\":$1}}"
}

xpk_create() {
  local options=(--cluster "$cluster" --workload "$name" --tpu-type "$type" --num-slices "$slices"
    --docker-image "$image" --command "python -m maxlite.$command $(quote "${rest[@]}")"
    --max-restarts "$max_restarts" --termination-grace-period-seconds "$grace_seconds"
    --restart-on-exit-codes "1,3,5-126") # besides its own, 127 to 255: all but 2 and 4
  [[ -z $storage ]] || options+=(--storage "$storage")
  [[ -z $zone ]] || options+=(--zone "$zone")
  [[ -z $project ]] || options+=(--project "$project")
  run xpk workload create "${options[@]}"
}

case $action in
  run | manifest | xpk) ((${#rest[@]})) || fail "no CONFIG given; see $0 --help" ;;
  *) ((${#rest[@]} == 0)) || fail "$action takes no CONFIG" ;;
esac
for word in "$image" "$accelerator" "$claim" "$mount" "${rest[@]}"; do
  [[ $word != *[[:cntrl:]]* ]] || fail "$(quote "$word") has a control character in it"
done
case $action in
  run | manifest)
    need --image "$image"
    need --accelerator "$accelerator"
    need --topology "$topology"
    need --claim "$claim"
    hosts=$(hosts_per_slice)
    ;;
esac
case $action in
  manifest) manifest ;;
  run)
    apply
    logs
    ;;
  xpk)
    need --image "$image"
    need --cluster "$cluster"
    need --type "$type"
    xpk_create
    ;;
  logs) logs ;;
  stop) suspend true ;;
  resume)
    suspend false
    logs
    ;;
  status)
    kube get jobset "$name"
    kube get pods --selector "jobset.sigs.k8s.io/jobset-name=$name"
    ;;
  delete) kube delete jobset "$name" ;;
esac
