#!/bin/sh
set -e
cd /app
sed -i 's|http://|https://|' etc/*.conf
