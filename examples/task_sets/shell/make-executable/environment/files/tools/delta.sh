#!/bin/sh
echo delta
