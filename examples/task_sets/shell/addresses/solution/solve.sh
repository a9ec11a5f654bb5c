#!/bin/sh
set -e
cd /app
grep -o '[a-z]*@[a-z]*\.example' letter.txt | LC_ALL=C sort -u > answer.txt
