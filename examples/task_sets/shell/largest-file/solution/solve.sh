#!/bin/sh
set -e
cd /app
ls -S data | head -1 > answer.txt
