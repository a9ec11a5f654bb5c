#!/bin/sh
set -e
cd /app
tr ' ' '\n' < text.txt | sort | uniq -c | sort -rn | head -1 | awk '{print $2}' > answer.txt
