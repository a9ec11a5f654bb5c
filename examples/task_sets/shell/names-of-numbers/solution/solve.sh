#!/bin/sh
set -e
cd /app
awk 'NR == FNR { name[$1] = $2; next } { print name[$1], $2 }' names.txt orders.txt > named.txt
