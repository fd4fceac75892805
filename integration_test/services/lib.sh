# shellcheck shell=bash
# The common part of the service scripts: where their state lives, how a
# missing program is installed, how a daemon is started, watched and stopped.
# Sourced by every script of this folder, never run.
#
# Exit codes: 0 done; 3 this machine cannot run the service (no package
# manager, no root, not Linux), which is no fault of the service; 1 anything
# else.
set -euo pipefail
umask 022

services_dir=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
repo_dir=$(cd -- "$services_dir/../.." && pwd -P)

# In the order in which they are started; stopped in the reverse order.
# shellcheck disable=SC2034
all_services=(pg15 pg18 pgdurable pgbouncer kafka kafkasecure kafka3 rabbitmq elasticmq)

# Exit code for "not on this machine"; callers tell it from a failure.
cannot_run=3

say() { printf 'services: %s\n' "$*" >&2; }

fail() {
  say "$*"
  exit 1
}

cannot() {
  say "$*"
  exit "$cannot_run"
}

is_root() { [ "$(id -u)" -eq 0 ]; }

# server_user prints the account that the servers run as. PostgreSQL and
# PgBouncer refuse to run as root.
server_user() {
  if ! is_root; then
    id -un
  elif id -u postgres >/dev/null 2>&1; then
    echo postgres
  else
    echo nobody
  fi
}

# server_prefix sets prefix to the words that make a command run as
# server_user. setpriv replaces itself by the command, so that a pid file names
# the server.
server_prefix() {
  prefix=()
  if is_root; then
    local user
    user=$(server_user)
    prefix=(setpriv --reuid="$user" --regid="$(id -gn "$user")" --init-groups --)
  fi
}

# as_server COMMAND... runs a command as server_user.
as_server() {
  local -a prefix
  server_prefix
  "${prefix[@]}" "$@"
}

# choose_state prints the folder for everything that the services write:
# .services in the repository, or a folder in TMPDIR when the account of the
# servers cannot get into the repository (a checkout below /root, say) or the
# repository cannot be written.
choose_state() {
  if [ -n "${ACKAFTER_SERVICES_DIR:-}" ]; then
    echo "$ACKAFTER_SERVICES_DIR"
  elif [ "$(uname -s)" != Linux ] || { [ -w "$repo_dir" ] && as_server test -x "$repo_dir" 2>/dev/null; }; then
    echo "$repo_dir/.services"
  else
    echo "${TMPDIR:-/tmp}/ackafter-services-$(id -u)-$(printf %s "$repo_dir" | cksum | cut -d' ' -f1)"
  fi
}

state=$(choose_state)

# open_state makes the state folder and takes its lock, so that two runs do
# not start one server twice. The lock is held by file descriptor 9 until the
# script ends; daemons must close it.
open_state() {
  [ "$(uname -s)" = Linux ] || cannot "the native services need Linux, this is $(uname -s)"
  mkdir -p "$state" || fail "cannot create the state folder $state"
  [ -O "$state" ] || fail "the state folder $state belongs to another user: stop its services and remove it, or set ACKAFTER_SERVICES_DIR"
  state=$(cd -- "$state" && pwd -P)
  chmod 755 "$state"
  if [ "${ACKAFTER_SERVICES_LOCKED:-}" != "$state" ]; then
    exec 9>"$state/lock"
    flock -w 600 9 || fail "another run holds $state/lock for more than 10 minutes"
    export ACKAFTER_SERVICES_LOCKED=$state
  fi
}

# retry COUNT COMMAND... runs a command until it succeeds, with 2, 4, 8 .. s in
# between.
retry() {
  local count=$1 try pause=2
  shift
  for ((try = 1; try <= count; try++)); do
    if "$@"; then
      return 0
    fi
    if ((try < count)); then
      say "failed (attempt $try of $count), again in $pause s: $*"
      sleep "$pause"
      pause=$((pause * 2))
    fi
  done
  say "failed $count times: $*"
  return 1
}

# as_admin COMMAND... runs a command as root, by sudo if need be.
as_admin() {
  if is_root; then
    "$@"
  elif command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
    sudo -- "$@"
  else
    return "$cannot_run"
  fi
}

# can_install says whether install_packages has a chance.
can_install() { command -v apt-get >/dev/null && as_admin true; }

# install_packages PACKAGE... installs Debian packages. While it runs, a
# policy-rc.d keeps the packages from starting their daemons and a setting
# keeps PostgreSQL from making a cluster of its own; both are removed again.
install_packages() {
  command -v apt-get >/dev/null || cannot "cannot install $*: there is no apt-get on this machine"
  as_admin true || cannot "cannot install $*: neither root nor sudo without a password"
  say "installing $*"
  local policy=/usr/sbin/policy-rc.d clusters=/etc/postgresql-common/createcluster.d/ackafter.conf
  local placed=("$clusters")
  as_admin mkdir -p "${clusters%/*}"
  echo 'create_main_cluster = false' | as_admin tee "$clusters" >/dev/null
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | as_admin tee "$policy" >/dev/null
    as_admin chmod 755 "$policy"
    placed+=("$policy")
  fi
  local status=0
  # Package lists may be missing or old: fetch them only when needed.
  apt_install "$@" >/dev/null 2>&1 || retry 3 update_and_install "$@" || status=1
  as_admin rm -f -- "${placed[@]}"
  [ "$status" -eq 0 ] || fail "apt-get could not install $*: see the messages above"
}

apt_install() {
  as_admin env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "$@" </dev/null 9>&-
}

update_and_install() {
  as_admin apt-get update -qq 9>&- >&2 && apt_install "$@" >&2
}

# need COMMAND PACKAGE... installs the packages unless the command is there.
need() {
  local program=$1
  shift
  command -v "$program" >/dev/null || install_packages "$@"
}

# need_java installs Java and Maven unless they are there.
need_java() {
  need java default-jre-headless
  local version
  version=$(java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
  [ "${version:-0}" -ge 17 ] || cannot "Java 17 or newer is needed, the java on the PATH says ${version:-nothing}"
}

need_maven() {
  need_java
  need mvn maven
}

# maven_fetch FOLDER GROUP:ARTIFACT:VERSION... puts the artifacts and what they
# need at run time into FOLDER, once: the folder appears only when complete.
maven_fetch() {
  local folder=$1 work=$1.part coordinate group artifact version
  shift
  [ -d "$folder" ] && return 0
  need_maven
  say "fetching $*"
  rm -rf -- "$work"
  mkdir -p "$work"
  {
    echo '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
    echo '<groupId>local</groupId><artifactId>fetch</artifactId><version>1</version><packaging>pom</packaging><dependencies>'
    for coordinate in "$@"; do
      IFS=: read -r group artifact version <<<"$coordinate"
      echo "<dependency><groupId>$group</groupId><artifactId>$artifact</artifactId><version>$version</version></dependency>"
    done
    echo '</dependencies></project>'
  } >"$work/pom.xml"
  if ! retry 3 maven_copy "$work"; then
    tail -n 20 "$work/mvn.log" >&2 || true
    fail "Maven could not fetch $*: is its repository reachable?"
  fi
  mv -- "$work/libs" "$folder"
  rm -rf -- "$work"
}

maven_copy() {
  timeout 300 mvn -q -B -f "$1/pom.xml" dependency:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory="$1/libs" >"$1/mvn.log" 2>&1 </dev/null 9>&-
}

port_open() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# choose_port NAME WISH prints the port of a service: the one that it had, as
# long as nobody else took it, else the wish or the next free one of WISH+100,
# WISH+200 .. . All wishes lie below the ports that the kernel gives away.
choose_port() {
  local file=$state/$1.port port=$2 last=$(($2 + 2000))
  if [ -s "$file" ] && ! port_open "$(<"$file")"; then
    cat "$file"
    return 0
  fi
  while port_open "$port"; do
    port=$((port + 100))
    [ "$port" -le "$last" ] || fail "$1: no free port from $2 to $last"
  done
  echo "$port" | tee "$file"
}

# alive PID WORD says whether the process runs and has WORD in its command
# line: after a crash the pid of a stale pid file may be somebody else's.
alive() {
  [ -n "$1" ] && [ -r "/proc/$1/cmdline" ] && tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -qF -- "$2"
}

# wait_until SECONDS WHAT COMMAND... polls a command.
wait_until() {
  local limit=$(($(date +%s) + $1)) what=$2
  shift 2
  until "$@"; do
    if [ "$(date +%s)" -ge "$limit" ]; then
      say "gave up waiting: $what"
      return 1
    fi
    sleep 0.1
  done
}

# spawn NAME COMMAND... starts a daemon: own session, no terminal, output in
# NAME.log, pid in NAME.pid.
spawn() {
  local name=$1
  shift
  : >"$state/$name.log" # Now, so that nobody reads there what an earlier run said.
  setsid nohup "$@" >"$state/$name.log" 2>&1 </dev/null 9>&- &
  echo $! >"$state/$name.pid"
}

spawned_pid() { cat "$state/$1.pid" 2>/dev/null || true; }

# stop_pid NAME PID WORD [SECONDS] ends a process that alive knows: SIGTERM, and
# after 20 s, or SECONDS, SIGKILL.
stop_pid() {
  local name=$1 pid=$2 word=$3 seconds=${4:-20}
  if alive "$pid" "$word"; then
    kill -TERM "$pid" 2>/dev/null || true
    if ! wait_until "$seconds" "$name (pid $pid) ends" gone "$pid" "$word"; then
      say "$name did not end by itself: SIGKILL"
      kill -KILL "$pid" 2>/dev/null || true
      wait_until 10 "$name (pid $pid) dies" gone "$pid" "$word"
    fi
  fi
  rm -f -- "$state/$name.pid"
}

gone() { ! alive "$1" "$2"; }

# show_log FILE prints the end of a log after a failed start.
show_log() {
  [ -r "$1" ] || return 0
  say "the end of $1:"
  tail -n 25 "$1" >&2
}

# dispatch VERB calls what a service script defines: the functions install,
# start, stop, running and address, and variable, the name of the environment
# variable for the address. running and address must not change anything.
dispatch() {
  cd /
  case "${1:-}" in
  up)
    open_state
    if running; then
      return 0
    fi
    install
    start
    ;;
  down)
    [ -d "$state" ] || return 0
    open_state
    stop
    ;;
  running) running ;;
  env) running && printf "export %s='%s'\n" "${variable:?}" "$(address)" ;;
  variable) echo "${variable:?}" ;;
  *)
    echo "usage: $0 up|down|running|env|variable" >&2
    exit 2
    ;;
  esac
}
