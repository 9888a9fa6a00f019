#!/bin/bash
# Runs on each host of a TPU slice for tools/launch_tpu.py, which has unpacked the code:
#
# tpu_worker.sh install BUCKET | start MODULE ARGUMENT... | follow | watch | status
#
# `start` stops the job after LIMIT_SECONDS, if that is set: by SIGTERM, at which it saves, and
# SAVE_SECONDS later by SIGKILL.
#
# ~/launch holds the code, its environment, and the job's log, process id (pid) and exit_code.

cd ~/launch || exit
is_running() { kill -0 "$(cat pid 2>/dev/null)" 2>/dev/null; }

install() {
  set -e
  python3 -m pip install --quiet --user uv # The TPU images have Python 3.10; uv installs 3.13.
  uv=~/.local/bin/uv
  test -x venv/bin/python || $uv venv --quiet --python=3.13 venv
  export VIRTUAL_ENV=$PWD/venv
  $uv pip install --quiet --require-hashes --requirement=code/requirements.lock
  $uv pip install --quiet --editable='./code[tpu,optuna]'
  if ! mountpoint --quiet /gcs; then
    command -v gcsfuse || sudo apt-get -o DPkg::Lock::Timeout=300 --quiet --yes install gcsfuse
    # Without a metadata cache, a host sees the files of the others at once. systemd keeps the
    # bucket mounted while the job saves during a shutdown.
    echo 'metadata-cache: {ttl-secs: 0, negative-ttl-secs: 0}' | sudo tee /etc/gcsfuse.yaml
    options=rw,_netdev,allow_other,uid=$(id -u),gid=$(id -g),config_file=/etc/gcsfuse.yaml
    echo "$1 /gcs gcsfuse $options 0 0" | sudo tee -a /etc/fstab
    sudo mkdir -p /gcs
    sudo systemctl daemon-reload
    sudo systemctl start gcs.mount
  fi
  # Saving a checkpoint renames a directory: fail now rather than at the first save.
  try=/gcs/.try.$(hostname)
  if ! (mkdir -p "$try/a" && touch "$try/a/file" && mv "$try/a" "$try/b" && rm -r "$try"); then
    echo "gs://$1 must be writable and have a hierarchical namespace" >&2
    exit 1
  fi
}

start() {
  if is_running; then # Perhaps it was started by an attempt that lost its connection.
    echo "$(hostname): a job is already running"
    return
  fi
  rm -f exit_code
  # A session of its own survives the end of the connection.
  nohup setsid bash -c 'limit=
    if test "$LIMIT_SECONDS"; then
      limit="timeout --foreground --kill-after=$SAVE_SECONDS $LIMIT_SECONDS"
    fi
    (cd code && exec $limit ../venv/bin/python -m "$@")
    code=$?
    # JAX aborts a process that has lost another one: that counts as preempted, too.
    lost="distributed service detected fatal errors"
    if test $code = 134 && grep --quiet "$lost" log; then code=75; fi
    if test $code = 143; then code=75; fi # SIGTERM before the run could handle it.
    echo $code >exit_code' bash "$@" >log 2>&1 </dev/null &
  echo $! >pid
}

follow() {
  if is_running; then tail --lines=200 --follow --pid="$(cat pid)" log; fi
}

watch() { # Waits for the end of the job, if it runs, and prints its exit code unless it finished.
  test -e pid || return 0
  if is_running; then tail --follow --pid="$(cat pid)" /dev/null; fi
  code=$(cat exit_code 2>/dev/null || echo none)
  test "$code" = 0 || echo "$(hostname): the job ended (exit code $code): $(tail --lines=1 log)"
}

status() { # Prints the exit code, 124 at the limit, or running; without a code it was preempted.
  state=none
  if test -e pid; then is_running && state=running || state=75; fi
  if test -s exit_code; then state=$(cat exit_code); fi
  echo "$(hostname) $state"
  case $state in none | running | 0 | 75 | 124) ;; *) tail --lines=40 log ;; esac
}

"$@"
