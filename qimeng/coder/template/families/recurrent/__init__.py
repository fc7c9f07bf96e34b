"""The recurrent family: loops over steps whose states meet weights, such as LSTM, GRU and RNN layers."""
