#!/bin/sh
set -e
cd /app
awk 'length > most { most = length; at = NR; line = $0 } END { print at, line }' text.txt > answer.txt
