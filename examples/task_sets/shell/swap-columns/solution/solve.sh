#!/bin/sh
set -e
cd /app
awk -F, -v OFS=, '{ print $2, $1, $3 }' table.csv > swapped.csv
