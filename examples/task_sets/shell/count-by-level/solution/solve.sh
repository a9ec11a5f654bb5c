#!/bin/sh
set -e
cd /app
cut -d' ' -f1 run.log | LC_ALL=C sort | uniq -c | awk '{ print $2, $1 }' > levels.txt
