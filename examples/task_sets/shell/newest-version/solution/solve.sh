#!/bin/sh
set -e
cd /app
cd releases; ln -s "$(ls | sort -V | tail -1)" latest
