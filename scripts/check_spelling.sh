#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Spelling of code and documents.
cd "$(dirname "$0")/.." || exit 1
git ls-files -co --exclude-standard | grep -v '^LICENSE$\|^test/fuzz/corpus/' |
    xargs codespell -L 'heddle,te,nd,ans,fo,inout,ue,hist,sting,ba,whats'
