# shellcheck shell=bash
# One PostgreSQL server. The script that sources this sets: name, major,
# maven_version, wish (port), variable, durable (yes or no).
#
# The server listens on loopback, trusts every connection and has no socket:
# it is for tests on this machine only. Its data is removed by down; after a
# crash of the server, up recovers it.
# shellcheck source=lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

: "${name:?}" "${major:?}" "${maven_version:?}" "${wish:?}" "${variable:?}" "${durable:?}"
home=$state/$name
data=$home/data

# programs prints the folder with initdb, pg_ctl and postgres.
programs() {
  if [ -x "/usr/lib/postgresql/$major/bin/postgres" ]; then
    echo "/usr/lib/postgresql/$major/bin"
  else
    echo "$state/dist/postgres-$maven_version/bin"
  fi
}

postmaster() { head -n 1 "$data/postmaster.pid" 2>/dev/null || true; }

running() {
  alive "$(postmaster)" "$data" && port_open "$(cat "$state/$name.port")"
}

# install takes the distribution's package, or the archive that Maven has when
# the distribution has no such version.
install() {
  [ ! -x "$(programs)/postgres" ] || return 0
  if can_install && packaged; then
    install_packages "postgresql-$major"
  else
    install_archive
  fi
}

packaged() {
  local known
  known=$(apt-cache policy "postgresql-$major" 2>/dev/null)
  if ! grep -q 'Candidate: [0-9]' <<<"$known"; then
    retry 3 as_admin apt-get update -qq >&2 9>&- || true
    known=$(apt-cache policy "postgresql-$major" 2>/dev/null)
  fi
  grep -q 'Candidate: [0-9]' <<<"$known"
}

install_archive() {
  local kind target=$state/dist/postgres-$maven_version jars=$state/dist/postgres-$maven_version-jars
  case "$(uname -m)" in
  x86_64) kind=linux-amd64 ;;
  aarch64) kind=linux-arm64v8 ;;
  *) cannot "there is no PostgreSQL $maven_version archive for $(uname -m)" ;;
  esac
  need unzip unzip
  need xz xz-utils
  mkdir -p "$state/dist"
  maven_fetch "$jars" "io.zonky.test.postgres:embedded-postgres-binaries-$kind:$maven_version"
  rm -rf -- "$target.part"
  mkdir -p "$target.part"
  unzip -qo "$jars"/*.jar -d "$target.part"
  tar -xJf "$target.part"/*.txz -C "$target.part"
  rm -f -- "$target.part"/*.txz
  mv -- "$target.part" "$target"
}

start() {
  local bin port
  bin=$(programs)
  make_data "$bin"
  port=$(choose_port "$name" "$wish")
  settings "$port" >"$home/server.conf"
  chown -R "$(server_user)" "$home"
  # A postmaster that was killed leaves backends behind for a moment, and as
  # long as one lives a new postmaster refuses to start.
  if ! wait_until 15 "$name starts" launch "$bin"; then
    show_log "$home/server.log"
    fail "$name: PostgreSQL $major did not start"
  fi
  say "$name is ready: PostgreSQL $major on 127.0.0.1:$port"
}

launch() {
  as_server "$1/pg_ctl" -s -w -t 60 -D "$data" -l "$home/server.log" start </dev/null >/dev/null 2>&1 9>&-
}

# make_data creates the cluster unless there is a complete one: initdb works in
# a folder that gets its name at the end.
make_data() {
  [ ! -s "$data/PG_VERSION" ] || return 0
  rm -rf -- "$home"
  mkdir -p "$home"
  chown "$(server_user)" "$home"
  if ! as_server "$1/initdb" -D "$data.part" -U postgres --auth=trust \
    --encoding=UTF8 --locale=C.UTF-8 --no-sync </dev/null >"$home/initdb.log" 2>&1 9>&-; then
    show_log "$home/initdb.log"
    fail "$name: initdb of PostgreSQL $major failed"
  fi
  echo "include '$home/server.conf'" >>"$data.part/postgresql.conf"
  mv -- "$data.part" "$data"
}

settings() {
  cat <<EOF
listen_addresses = '127.0.0.1'
port = $1
unix_socket_directories = ''
max_connections = 300
max_prepared_transactions = 50
wal_level = logical
max_wal_size = '2GB'
checkpoint_timeout = '15min'
log_line_prefix = '%m [%p] %d %e '
EOF
  if [ "$durable" = yes ]; then
    printf '%s = on\n' fsync synchronous_commit full_page_writes
  else
    printf '%s = off\n' fsync synchronous_commit full_page_writes
  fi
}

stop() {
  local pid
  pid=$(postmaster)
  if alive "$pid" "$data"; then
    # SIGINT is PostgreSQL's fast shutdown: connections are ended, not awaited.
    kill -INT "$pid" 2>/dev/null || true
    if ! wait_until 30 "$name (pid $pid) ends" gone "$pid" "$data"; then
      kill -QUIT "$pid" 2>/dev/null || true
      wait_until 10 "$name (pid $pid) dies" gone "$pid" "$data"
    fi
  fi
  rm -rf -- "$home" "$state/$name.port"
}

address() { echo "postgres://postgres@127.0.0.1:$(<"$state/$name.port")/postgres?sslmode=disable"; }
