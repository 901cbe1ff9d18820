#!/usr/bin/env bash
# Prints the name of this node's NVLink domain. Nodes of one rack (NVL72) report the same cluster and clique to the
# driver; on any other node, also one without GPUs, NVLink ends at the node, and the name is the node's own.
clique=$(nvidia-smi -q 2>/dev/null | awk -F ' *: *' '
    /ClusterUUID/ { uuid = $2 }
    /CliqueId/ { clique = $2 }
    END { if (uuid ~ /[1-9a-f]/) print uuid "." clique }') # servers without such a fabric have N/A or all zeros
echo "${clique:-${SLURMD_NODENAME:-$(uname -n)}}"
