#compdef ds2
# Completion of ds2 for zsh, by `ds2 completion zsh`: write it to a file _ds2 in a folder of $fpath.
_ds2() {
    local option="${words[CURRENT-1]}" command="${words[2,CURRENT-1]}" candidates="" values=""
    [[ "${words[CURRENT]}" == --*=* ]] && option="${words[CURRENT]%%=*}" && compset -P '*='
# THE CASES OF ALL COMMANDS
    if [[ -n "${values// }" ]]; then
        compadd -- ${=values}
        return
    fi
    _files
    [[ -n "$values" ]] && return
    [[ -z "${words[CURRENT]}" ]] && candidates="${${=candidates}:#(-*|*=|decode=*|alphabet=*)}"
    compadd -- ${${=candidates}:#*=}
    compadd -S "" -- ${(M)${=candidates}:#*=}
}
compdef _ds2 ds2
