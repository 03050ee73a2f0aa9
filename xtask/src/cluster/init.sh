# PID 1 of a node, in namespaces of its own: makes the node's root and keeps containerd and
# kubelet running. NAME, ADDRESS, IPV6 (address or nothing), DISK, BASE,
# BIN and PAUSE come from the environment.
set -eu
# xtask now moves the parent of this process (unshare) out of its group.
echo began
mount --make-rprivate /
root=$DISK/merged
mount -t overlay -o "lowerdir=$BASE,upperdir=$DISK/upper,workdir=$DISK/work" overlay "$root"
# What cannot lie on an overlay: containerd makes overlays of its own there.
for directory in containerd kubelet etcd; do
  mkdir -p "$DISK/$directory" "$root/var/lib/$directory"
  mount --bind "$DISK/$directory" "$root/var/lib/$directory"
done
mkdir -p "$root/opt/bin" "$root/opt/settings" "$root/before"
mount --bind "$BIN" "$root/opt/bin"
mount -t proc proc "$root/proc"
# Settings of the whole machine that kubelet makes: it makes them in files.
while read -r name value; do
  file=$root/opt/settings/$(echo "$name" | tr / .)
  echo "$value" > "$file"
  mount --bind "$file" "$root/proc/sys/$name"
done <<END
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END
mount -t sysfs sysfs "$root/sys"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
  mkdir -p "$root/sys/fs/cgroup/init"
  echo 1 > "$root/sys/fs/cgroup/init/cgroup.procs"
  for controller in $(cat "$root/sys/fs/cgroup/cgroup.controllers"); do
    tries=0
    until echo "+$controller" > "$root/sys/fs/cgroup/cgroup.subtree_control" 2> /dev/null; do
      tries=$((tries + 1))
      [ $tries -lt 50 ] || { echo "no cgroup controller $controller for the kubelet" >&2; break; }
      sleep 0.1
    done
  done
else
  mount -t tmpfs -o mode=755 cgroup "$root/sys/fs/cgroup"
  for hierarchy in $HIERARCHIES; do
    mkdir "$root/sys/fs/cgroup/$hierarchy"
    case $hierarchy in systemd) option=none,name=systemd ;; *) option=$hierarchy ;; esac
    mount -t cgroup -o "$option" cgroup "$root/sys/fs/cgroup/$hierarchy"
  done
fi
mount -t bpf bpf "$root/sys/fs/bpf"
mount --rbind /dev "$root/dev"
mount --make-rslave "$root/dev"
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs tmp "$root/tmp"
mkdir "$root/run/lock"
hostname "$NAME"
echo "$NAME" > "$root/etc/hostname"
printf '127.0.0.1 localhost\n%s %s\n' "$ADDRESS" "$NAME" > "$root/etc/hosts"
echo 'nameserver 127.0.0.1' > "$root/etc/resolv.conf"
[ -s "$root/etc/machine-id" ] && [ -e "$DISK/machine-id" ] || {
  tr -d - < /proc/sys/kernel/random/uuid > "$DISK/machine-id"
  cp "$DISK/machine-id" "$root/etc/machine-id"
}
cd "$root"
pivot_root . before
mount --make-rprivate /before
umount -l /before
# hostPath volumes with propagation want it.
mount --make-rshared /
echo 1 > /proc/sys/net/ipv4/ip_forward
[ -z "$IPV6" ] || echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
mkdir -p /etc/containerd /etc/cni/net.d /opt/cni/bin /var/log
cat > /etc/containerd/config.toml <<END
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$PAUSE"
  disable_apparmor = true
  # Not every machine lets root lower a score.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
END
export PATH=/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
unset DISK BASE BIN
# The process that started this waits for this line.
echo ready
exec > /var/log/init.log 2>&1 < /dev/null
containerd_forever() {
  while :; do
    containerd >> /var/log/containerd.log 2>&1 || true
    sleep 0.5
  done
}
kubelet_forever() {
  while :; do
    if [ -e /var/lib/kubelet/config.yaml ]; then
      KUBELET_KUBEADM_ARGS=
      [ ! -e /var/lib/kubelet/kubeadm-flags.env ] || . /var/lib/kubelet/kubeadm-flags.env
      kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
        --kubeconfig=/etc/kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml \
        --node-ip="$ADDRESS${IPV6:+,$IPV6}" $KUBELET_KUBEADM_ARGS >> /var/log/kubelet.log 2>&1 || true
    fi
    sleep 0.5
  done
}
containerd_forever &
kubelet_forever &
# Collects what dies.
while :; do
  wait || true
  sleep 1
done
