#!/bin/sh
set -e
cd /app
awk '!seen[$0]++' list.txt > once.txt
