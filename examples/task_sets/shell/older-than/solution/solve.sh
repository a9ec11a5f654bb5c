#!/bin/sh
set -e
cd /app
awk -F'\t' '$2 > 40 { print $1 }' people.tsv | LC_ALL=C sort > answer.txt
