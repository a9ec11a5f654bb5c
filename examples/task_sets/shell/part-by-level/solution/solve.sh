#!/bin/sh
set -e
cd /app
awk '{ print > ($1 ".log") }' all.log
