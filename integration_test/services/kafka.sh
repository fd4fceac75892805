# shellcheck shell=bash
# Apache Kafka in KRaft mode, from Maven, with kcat as a client that is not ours.
# What the scripts of its services share; they source it and set name.
# shellcheck source=lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

version=4.4.0
: "${name:?}"
home=$state/$name
libs=$state/dist/kafka-$version
java_options=(-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dorg.slf4j.simpleLogger.defaultLogLevel=info)

install() { install_kafka; }

install_kafka() {
  need_java
  need kcat kcat
  mkdir -p "$state/dist"
  # Kafka brings no log backend; without one nothing says when it has started.
  maven_fetch "$libs" "org.apache.kafka:kafka_2.13:$version" org.slf4j:slf4j-simple:1.7.36
}

# java_kafka HEAP CLASS ARGUMENT... runs a program of Kafka's.
java_kafka() {
  local heap=$1
  shift
  java "-Xmx$heap" "${java_options[@]}" -cp "$libs/*" "$@"
}

# cluster_id prints a new one. It must not begin with a hyphen, as options do.
cluster_id() { head -c16 /dev/urandom | base64 | tr '+/' 'AB' | cut -c1-22; }

# format_node CONFIG DATA ID makes the data folder of a node, unless it is there.
format_node() {
  [ ! -s "$2/meta.properties" ] || return 0
  rm -rf -- "$2"
  if ! java_kafka 128m kafka.tools.StorageTool format -t "$3" -c "$1" >"$2.format.log" 2>&1 </dev/null 9>&-; then
    show_log "$2.format.log"
    fail "$name: formatting the data folder failed"
  fi
}

# spawn_node NODE CONFIG starts a broker, and await_node NODE waits until it
# takes requests. NODE names its log and its pid.
spawn_node() {
  spawn "$1" java -Xmx384m "${java_options[@]}" -cp "$libs/*" kafka.Kafka "$2"
}

await_node() {
  if ! wait_until 90 "$1 answers" started_or_dead "$1" || ! started "$1"; then
    show_log "$state/$1.log"
    fail "$1 did not start"
  fi
}

started() { grep -q 'Kafka Server started' "$state/$1.log" 2>/dev/null; }

started_or_dead() { started "$1" || ! kill -0 "$(spawned_pid "$1")" 2>/dev/null; }

# node_settings NODE_ID DATA COPIES prints the settings that all brokers have.
# COPIES is how many copies of internal topics there are. The short broker
# session makes a restart after a crash quick; the short group session limit lets
# a test notice a killed member soon, and the short clean-up times let it see
# compaction and expired segments.
node_settings() {
  cat <<END
process.roles=broker,controller
node.id=$1
log.dirs=$2
num.partitions=3
offsets.topic.replication.factor=$3
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=$3
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=$3
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
log.initial.task.delay.ms=1000
log.retention.check.interval.ms=1000
log.cleaner.backoff.ms=500
log.cleaner.dedupe.buffer.size=2097152
END
}

# What a service of one broker is, unless its script says otherwise. It sets wish
# and controller_wish, the ports, and defines settings PORT CONTROLLER_PORT, which
# prints what the configuration has beside node_settings.
config=$home/server.properties

running() {
  alive "$(spawned_pid "$name")" "$config" && port_open "$(cat "$state/$name.port")"
}

start() {
  local port controller
  # A broker that hangs, or still dies, must be gone before its data is opened.
  stop_pid "$name" "$(spawned_pid "$name")" "$config"
  port=$(choose_port "$name" "${wish:?}")
  controller=$(choose_port "$name-controller" "${controller_wish:?}")
  mkdir -p "$home"
  { node_settings 1 "$home/data" 1 && settings "$port" "$controller"; } >"$config"
  format_node "$config" "$home/data" "$(cluster_id)"
  spawn_node "$name" "$config"
  await_node "$name"
  say "$name is ready: Kafka $version on 127.0.0.1:$port"
}

stop() {
  stop_pid "$name" "$(spawned_pid "$name")" "$config"
  rm -rf -- "$home" "$state/$name.port" "$state/$name-controller.port" "$state/$name.log"
}

address() { echo "127.0.0.1:$(<"$state/$name.port")"; }
