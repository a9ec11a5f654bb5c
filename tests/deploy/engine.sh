#!/usr/bin/env bash
# A container engine for the tests, on a machine that has none, and a base image where no registry can be reached.
#
#   engine.sh up FOLDER      starts it; prints what to export            (root, Debian or Ubuntu)
#   engine.sh base FOLDER    prints the name of an image with Python 3.11: from a registry, or put together with debootstrap
#   engine.sh down FOLDER    ends it with all that it held, and gives iptables, forwarding, and links back as they were
#
# Packages that it installs (docker.io, iptables, debootstrap) stay. What cannot be done is said in one line, with exit status 3.
set -euo pipefail

impossible() { echo "engine: $1" >&2; exit 3; }
what=${1:?up, base or down} work=$(realpath -m "${2:?a folder for the engine}")
docker=/usr/bin/docker    # Debian's: a newer client that stands before it on the path may lack a builder
tables="raw mangle nat filter"
base_packages=ca-certificates,python3,python3-pip,python3-venv

installed() {             # PROGRAM PACKAGE...
  [ -n "$(command -v "$1")" ] || [ -x "/usr/sbin/$1" ] && return
  [ "$(id -u)" = 0 ] && [ -n "$(command -v apt-get)" ] || impossible "$1 is missing, and only root can install it with apt-get"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${@:2}"; } >"$work/apt.log" 2>&1 \
    || impossible "apt-get could not install ${*:2}: $(tail -1 "$work/apt.log")"
}

up() {
  [ "$(id -u)" = 0 ] || impossible "no container engine answers, and only root can start one"
  mkdir -p "$work"
  installed dockerd docker.io iptables
  installed iptables iptables
  for table in $tables; do iptables -t $table -S >"$work/$table.before" 2>/dev/null || rm -f "$work/$table.before"; done
  cat /proc/sys/net/ipv4/ip_forward >"$work/forward.before"
  ip -o link | awk -F ': ' '{print $2}' >"$work/links.before"
  setsid dockerd --data-root "$work/data" --exec-root "$work/run" --pidfile "$work/pid" -H "unix://$work/docker.sock" \
    >"$work/log" 2>&1 </dev/null &
  for _ in $(seq 150); do
    if $docker -H "unix://$work/docker.sock" info >/dev/null 2>&1; then
      echo "export DOCKER_HOST=unix://$work/docker.sock DOCKER_CONFIG=$work/config"
      return
    fi
    sleep 0.2
  done
  reason=$(tail -1 "$work/log"); down
  impossible "dockerd does not start here: $reason"
}

base() {
  client=docker; [ ! -S "$work/docker.sock" ] || client="$docker -H unix://$work/docker.sock"
  name=headway/test-base
  if $client image inspect $name >/dev/null 2>&1; then echo $name; return; fi
  if timeout 120 $client pull -q python:3.11-slim >/dev/null 2>&1; then echo python:3.11-slim; return; fi
  mkdir -p "$work"
  if [ ! -f "$work/base.tar" ]; then
    installed debootstrap debootstrap
    [ "$(id -u)" = 0 ] || impossible "no registry answers, and only root can put a base image together"
    mirror=$(sed -n 's/^URIs: //p; s/^deb \([^ ]*\) .*/\1/p' /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | head -1 || true)
    debootstrap --variant=minbase --include=$base_packages bookworm "$work/rootfs" ${mirror:+"$mirror"} >"$work/debootstrap.log" 2>&1 \
      || impossible "no registry answers, and debootstrap failed: $(tail -1 "$work/debootstrap.log")"
    cp /etc/ssl/certs/ca-certificates.crt "$work/rootfs/etc/ssl/certs/"    # also those that this machine trusts beyond the usual
    ln -sf python3 "$work/rootfs/usr/bin/python"
    rm -rf "$work"/rootfs/usr/lib/python3*/EXTERNALLY-MANAGED "$work"/rootfs/var/cache/apt/archives/*.deb \
      "$work"/rootfs/var/lib/apt/lists/* "$work"/rootfs/usr/share/{doc,man,locale}
    tar -C "$work/rootfs" -cf "$work/base.part" . && mv "$work/base.part" "$work/base.tar" && rm -rf "$work/rootfs"
  fi
  $client import -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' "$work/base.tar" $name >/dev/null
  echo $name
}

down() {
  if [ -f "$work/pid" ]; then
    client="$docker -H unix://$work/docker.sock"
    $client ps -aq 2>/dev/null | xargs -r $client rm -f >/dev/null 2>&1 || true
    $client network prune -f >/dev/null 2>&1 || true
    pid=$(cat "$work/pid"); kill "$pid" 2>/dev/null || true
    for _ in $(seq 150); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
    kill -9 "$pid" 2>/dev/null || true
  fi
  for table in $tables; do [ ! -f "$work/$table.before" ] || give_back $table "$work/$table.before"; done
  [ ! -f "$work/forward.before" ] || cat "$work/forward.before" >/proc/sys/net/ipv4/ip_forward
  [ ! -f "$work/links.before" ] || ip -o link | awk -F ': ' '{print $2}' | grep -vxF -f "$work/links.before" | grep -E '^(docker0|br-)' \
    | xargs -r -n1 ip link del || true
  awk -v w="$work/" 'index($2, w) == 1 {print $2}' /proc/mounts | sort -r | xargs -r umount -l
  for group in /sys/fs/cgroup/docker /sys/fs/cgroup/*/docker; do
    [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null || true    # another engine's are not empty
  done
  rm -rf "$work/data" "$work/run" "$work/docker.sock" "$work/pid" "$work"/*.before "$work/config"
}

give_back() {             # TABLE SAVED: takes away the engine's rules that came since, and touches nobody else's
  iptables -t "$1" -S | grep -vxF -f "$2" | grep -E 'DOCKER|docker0|br-' | sed -n 's/^-A/-D/p' | while read -r rule; do xargs iptables -t "$1" <<<"$rule"; done || true
  iptables -t "$1" -S | grep -vxF -f "$2" | awk '$1 == "-N" && $2 ~ /^DOCKER/ {print $2}' | xargs -r -n1 iptables -t "$1" -X || true
  grep '^-P' "$2" | while read -r _ chain policy; do iptables -t "$1" -P "$chain" "$policy"; done || true
}

"$what"
