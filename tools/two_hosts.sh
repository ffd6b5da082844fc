#!/usr/bin/env bash
# Run a command on ranks of several "hosts" of one Linux machine: network namespaces with a hostname and an address each,
# joined by a bridge, reached by mpirun through a stand-in for ssh. What a cluster does differently between hosts (its
# daemons, TCP transport, host names, nothing shared but the disk) happens here too.
#
#   tools/two_hosts.sh 2 -n 4 ds2 train recipe=synthetic device=cpu train.max_steps=4
#
# Arguments: number of hosts, then mpirun's. Needs root (unshare, ip, nsenter) and mpirun of Open MPI 5 on PATH.
# Exit status: mpirun's; 77 where namespaces are not permitted.
set -euo pipefail
hosts=$1; shift
work=$(mktemp -d)
id=ds2$$
pids=()
cleanup() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    ip link del "$id" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
ip link add "$id" type bridge 2>/dev/null || { echo "two_hosts: network namespaces are not permitted here" >&2; exit 77; }
ip addr add 10.77.0.254/24 dev "$id" && ip link set "$id" up

list=""
for n in $(seq 1 "$hosts"); do
    # a host: its own network and host name, kept by a process that sleeps
    unshare --net --uts sleep infinity & pid=$!
    pids+=("$pid"); echo "$pid" > "$work/host$n"
    for _ in $(seq 50); do [ "$(readlink /proc/$pid/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break; sleep 0.1; done
    nsenter --target "$pid" --uts hostname "host$n"
    ip link add "$id-$n" type veth peer name eth0 netns "$pid"
    ip link set "$id-$n" master "$id" up
    nsenter --target "$pid" --net ip addr add "10.77.0.$n/24" dev eth0
    nsenter --target "$pid" --net ip link set eth0 up
    nsenter --target "$pid" --net ip link set lo up
    echo "10.77.0.$n $n" >> "$work/addresses"
    list+="${list:+,}10.77.0.$n:8"
done

cat > "$work/rsh" <<RSH
#!/usr/bin/env bash
# rsh ADDRESS COMMAND...: what mpirun asks of ssh
while [[ \$1 == -* ]]; do shift; done
number=\$(awk -v a="\$1" '\$1 == a { print \$2 }' "$work/addresses"); shift
exec nsenter --target "\$(cat "$work/host\$number")" --net --uts bash -c "\$*"
RSH
chmod +x "$work/rsh"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_btl_tcp_if_include=10.77.0.0/24
mpirun=$(command -v mpirun)
# mpirun itself stands on the first host
nsenter --target "${pids[0]}" --net --uts "$mpirun" --prtemca plm_ssh_agent "$work/rsh" \
    --prtemca prte_if_include 10.77.0.0/24 --host "$list" --map-by node --bind-to none \
    -x PATH -x OMP_NUM_THREADS -x OMPI_MCA_btl -x OMPI_MCA_btl_tcp_if_include "$@"
