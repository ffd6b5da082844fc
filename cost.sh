for turn in 1 2 3 4; do
run
run features=log_mel
run model.row_convs=1 model.row_conv_context=16
run features=log_mel model.row_convs=1 model.row_conv_context=16
done
