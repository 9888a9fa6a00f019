#!/bin/bash
# What tools/launch_tpu.py runs on each host of a TPU slice; the code is in ~/launch/code by then.
#
# tpu_worker.sh install | mount BUCKET | start ARGUMENT... | follow | status | stop | last_lines
#
# ~/launch/job holds the job's arguments, its log, the process id of the shell that waits for it,
# the exit status once it has ended, and `stopped` if it was told to.

cd ~/launch || exit
running() { kill -0 "$(cat job/pid 2>/dev/null)" 2>/dev/null; }

install() {
  set -e
  python3 -m pip install --quiet --user uv # The images bring Python 3.10; uv brings 3.11.
  uv=~/.local/bin/uv
  test -x venv/bin/python || $uv venv --quiet --python=3.11 venv
  export VIRTUAL_ENV=$PWD/venv
  $uv pip install --quiet --require-hashes --requirement=code/requirements.lock
  $uv pip install --quiet --editable='./code[tpu]'
}

mount() {
  set -e
  if ! mountpoint --quiet /gcs; then
    if ! command -v gcsfuse >/dev/null &&
      ! sudo apt-get -o DPkg::Lock::Timeout=300 --quiet --yes install gcsfuse; then
      echo "install gcsfuse on the image first, as Google's page on Cloud Storage FUSE says" >&2
      exit 1
    fi
    # Without a metadata cache, hosts see each other's files at once. Mounted by systemd, so that
    # at a shutdown it outlives the session in which the job saves.
    echo 'metadata-cache: {ttl-secs: 0, negative-ttl-secs: 0}' | sudo tee /etc/gcsfuse.yaml
    options=rw,_netdev,allow_other,uid=$(id -u),gid=$(id -g),config_file=/etc/gcsfuse.yaml
    echo "$1 /gcs gcsfuse $options 0 0" | sudo tee -a /etc/fstab
    sudo mkdir -p /gcs
    sudo systemctl daemon-reload
    sudo systemctl start gcs.mount
  fi
  # Finishing a checkpoint renames a directory: better to fail now than at the first save.
  try=/gcs/.try.$(hostname)
  if ! (mkdir -p "$try/a" && touch "$try/a/file" && mv "$try/a" "$try/b" && rm -r "$try"); then
    echo "gs://$1 must let this machine write, and have a hierarchical namespace" >&2
    exit 1
  fi
}

start() {
  if running; then
    # Of a try whose connection was lost.
    if test "$*" = "$(cat job/arguments)"; then return; fi
    echo "another job is running already: follow it, or stop it" >&2
    exit 1
  fi
  rm -rf job
  mkdir job
  echo "$*" >job/arguments
  # A session of its own, which the end of the connection leaves alone.
  nohup setsid bash -c '(cd code && exec ../venv/bin/python -m bert_jax.pretrain "$@")
    status=$?
    # The runtime aborts a process that has lost another: as good as preempted.
    lost="distributed service detected fatal errors"
    if test $status = 134 && grep --quiet "$lost" job/log; then status=75; fi
    # SIGTERM while it waits for the other hosts, before it can trap it.
    if test $status = 143; then status=75; fi
    echo $status >job/status' start "$@" >job/log 2>&1 </dev/null &
  echo $! >job/pid
}

follow() {
  if running; then tail --lines=200 --follow --pid="$(cat job/pid)" job/log; fi
}

status() {
  # The process first: a job that ends in between has written its status by then.
  state=none
  if test -e job/pid; then running && state=running || state=lost; fi
  if test -s job/status; then state=$(cat job/status); fi
  if test "$state" = 75 -a -e job/stopped; then state=stopped; fi
  echo "$(hostname) $state"
}

stop() {
  if running; then
    touch job/stopped
    pkill -TERM --parent "$(cat job/pid)"
  else
    echo "$(hostname): no job is running" >&2
  fi
}

last_lines() {
  case "$(cat job/status 2>/dev/null)" in "" | 0 | 75) return ;; esac
  echo "== $(hostname), exit status $(cat job/status)"
  tail --lines=40 job/log
}

"$@"
