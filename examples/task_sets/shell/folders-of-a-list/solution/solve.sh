#!/bin/sh
set -e
cd /app
while read -r each; do mkdir -p tree/$each; : > tree/$each/README; done < folders.txt
